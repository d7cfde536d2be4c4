# Full fine-tuning of a pretrained model on one GPU: what config/finetune_*.py share, which come behind it.
# $ python train_fp8.py config/finetune.py --init_from=org/name --tokenizer=org/name --dataset=mine
# claim: not yet measured

# block_size: the default, 1,024 tokens or as many as the model reads
gradient_accumulation_steps = 1    # several would add up in bf16
num_epochs = 1.0
max_lr = 1e-5                      # a tenth of what models of that size are pretrained with, or less
# warm-up: the default, a tenth of the run and 100 steps at most
weight_decay = 0.0                 # the weights to stay near are not 0
optimizer = 'adamw8bit'            # 2.03 bytes a parameter, not 8
param_dtype = 'bf16'               # 2 bytes a weight and 2 a gradient, not 4
grad_checkpointing = 'full'
loss_chunks = 4                    # 128,256 tokens' logits and their gradients are 0.5 MB a token
eval_freq = 250
checkpoint_freq = 1000             # 4.03 bytes a parameter each
