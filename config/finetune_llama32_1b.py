# Llama 3.2 1B, full fine-tuning on OpenMathInstruct-2, FP8 linears; the bf16 run is the same with train.py.
# $ python prepare_data.py openmathinstruct2 --tokenizer=meta-llama/Llama-3.2-1B
# $ python train_fp8.py config/finetune.py config/finetune_llama32_1b.py
# claim: not yet measured. Memory by plan.py's count: 11.6 GB of a GPU's 141, in bf16 and FP8 (weights,
# gradients, moments, activations, logits: 2.5 + 2.5 + 2.5 + 0.9 + 3.2).

init_from = 'meta-llama/Llama-3.2-1B'
tokenizer = 'meta-llama/Llama-3.2-1B'
dataset = 'openmathinstruct2'
block_size = 1024                  # of a window, tokens
batch_size = 12                    # windows per micro-step
run_name = 'llama32-1b'
