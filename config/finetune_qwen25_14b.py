# Qwen2.5 14B, full fine-tuning on OpenMathInstruct-2, FP8 linears; the bf16 run is the same with train.py.
# $ python prepare_data.py openmathinstruct2 --tokenizer=Qwen/Qwen2.5-14B
# $ python train_fp8.py config/finetune.py config/finetune_qwen25_14b.py
# claim: not yet measured. Memory by plan.py's count: 96.5 GB of a GPU's 141, in bf16 and FP8 (weights,
# gradients, moments, activations, logits: 29.5 + 29.5 + 30.0 + 2.1 + 5.3).

init_from = 'Qwen/Qwen2.5-14B'
tokenizer = 'Qwen/Qwen2.5-14B'
dataset = 'openmathinstruct2'
block_size = 1024                  # of a window, tokens
batch_size = 4                     # windows per micro-step
run_name = 'qwen25-14b'
