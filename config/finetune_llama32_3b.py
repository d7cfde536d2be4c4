# Llama 3.2 3B, full fine-tuning on OpenMathInstruct-2, FP8 linears; the bf16 run is the same with train.py.
# $ python prepare_data.py openmathinstruct2 --tokenizer=meta-llama/Llama-3.2-3B
# $ python train_fp8.py config/finetune.py config/finetune_llama32_3b.py
# claim: not yet measured. Memory by plan.py's count: 25.7 GB of a GPU's 141, in bf16 and FP8 (weights,
# gradients, moments, activations, logits: 6.4 + 6.4 + 6.5 + 2.3 + 4.0).

init_from = 'meta-llama/Llama-3.2-3B'
tokenizer = 'meta-llama/Llama-3.2-3B'
dataset = 'openmathinstruct2'
block_size = 1024                  # of a window, tokens
batch_size = 12                    # windows per micro-step
run_name = 'llama32-3b'
