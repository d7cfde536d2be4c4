# Llama 3.1 8B, full fine-tuning on OpenMathInstruct-2, FP8 linears; the bf16 run is the same with train.py.
# $ python prepare_data.py openmathinstruct2 --tokenizer=meta-llama/Llama-3.1-8B
# $ python train_fp8.py config/finetune.py config/finetune_llama31_8b.py
# claim: not yet measured. Memory by plan.py's count: 55.0 GB of a GPU's 141, in bf16 and FP8 (weights,
# gradients, moments, activations, logits: 16.1 + 16.1 + 16.3 + 2.3 + 4.3).

init_from = 'meta-llama/Llama-3.1-8B'
tokenizer = 'meta-llama/Llama-3.1-8B'
dataset = 'openmathinstruct2'
block_size = 1024                  # of a window, tokens
batch_size = 8                     # windows per micro-step
run_name = 'llama31-8b'
