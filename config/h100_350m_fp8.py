# 350M Llama-like model (SwiGLU, RMSNorm, RoPE) on OpenWebText, FP8 linears, sized for one H100.
# $ python prepare_data.py openwebtext
# $ python train_fp8.py config/h100_350m_fp8.py
# claim: not yet measured

init_from = 'h100-350m'            # 24 x 1024, 16 heads, 350.4M parameters
dataset = 'openwebtext'
batch_size = 8                     # sequences of 1,024 tokens per micro-step
gradient_accumulation_steps = 16   # 8 x 1,024 x 16 = 131,072 tokens per step and GPU
max_tokens = 7_000_000_000         # 20 tokens per parameter (Hoffmann et al. 2022)
max_lr = 4e-4
warmup_steps = 2000                # 0.26B tokens
eval_freq = 500
checkpoint_freq = 500
run_name = 'h100-350m'
