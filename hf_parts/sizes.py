"""Models as model.py's GPTConfig has them, by name: rows of a table; released ones from their config.json."""

LLAMA_LIKE = dict(mlp='swiglu', norm='rmsnorm', position='rope', bias=False)
LLAMA3 = dict(LLAMA_LIKE, vocab_size=128_256, block_size=131_072, rope_theta=5e5, rope_factor=32.0)
LLAMA31 = dict(LLAMA3, rope_factor=8.0, tie_embeddings=False)
QWEN25 = dict(LLAMA_LIKE, vocab_size=151_936, block_size=32_768, norm_eps=1e-6, rope_theta=1e6, qkv_bias=True)
QWEN25_7B = dict(QWEN25, vocab_size=152_064, block_size=131_072, tie_embeddings=False)
QWEN25_14B = dict(QWEN25_7B, norm_eps=1e-5)
QWEN3 = dict(QWEN25, block_size=40_960, head_dim=128, qkv_bias=False, qk_norm=True)
QWEN3_8B = dict(QWEN3, tie_embeddings=False)
SMOLLM2 = dict(LLAMA_LIKE, vocab_size=49_152, block_size=8192, rope_theta=1e5)
SIZES = 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'ffn_dim'
ROWS = {                # family, then SIZES
    'gpt2':          ({}, 12, 12, 12, 768, 3072),           # 124M
    'gpt2-medium':   ({}, 24, 16, 16, 1024, 4096),          # 355M
    'gpt2-large':    ({}, 36, 20, 20, 1280, 5120),          # 774M
    'gpt2-xl':       ({}, 48, 25, 25, 1600, 6400),          # 1.56B
    # 350M: ffn_dim is 2.6 * n_embd, about SwiGLU's usual 8/3, in whole 128s for block-scaled FP8
    'h100-350m':     (LLAMA_LIKE, 24, 16, 16, 1024, 2688),
    'llama-3.2-1b':  (LLAMA3, 16, 32, 8, 2048, 8192),
    'llama-3.2-3b':  (LLAMA3, 28, 24, 8, 3072, 8192),
    'llama-3.1-8b':  (LLAMA31, 32, 32, 8, 4096, 14_336),
    'llama-3.1-70b': (LLAMA31, 80, 64, 8, 8192, 28_672),
    'qwen2.5-0.5b':  (QWEN25, 24, 14, 2, 896, 4864),
    'qwen2.5-1.5b':  (dict(QWEN25, block_size=131_072), 28, 12, 2, 1536, 8960),
    'qwen2.5-3b':    (QWEN25, 36, 16, 2, 2048, 11_008),
    'qwen2.5-7b':    (QWEN25_7B, 28, 28, 4, 3584, 18_944),
    'qwen2.5-14b':   (QWEN25_14B, 48, 40, 8, 5120, 13_824),
    'qwen2.5-32b':   (QWEN25_14B, 64, 40, 8, 5120, 27_648),
    'qwen2.5-72b':   (QWEN25_14B, 80, 64, 8, 8192, 29_568),
    'qwen3-0.6b':    (QWEN3, 28, 16, 8, 1024, 3072),
    'qwen3-1.7b':    (QWEN3, 28, 16, 8, 2048, 6144),
    'qwen3-4b':      (QWEN3, 36, 32, 8, 2560, 9728),
    'qwen3-8b':      (QWEN3_8B, 36, 32, 8, 4096, 12_288),
    'qwen3-14b':     (QWEN3_8B, 40, 40, 8, 5120, 17_408),
    'qwen3-32b':     (QWEN3_8B, 64, 64, 8, 5120, 25_600),
    'smollm2-135m':  (SMOLLM2, 30, 9, 3, 576, 1536),
    'smollm2-360m':  (SMOLLM2, 32, 15, 5, 960, 2560),
    'smollm2-1.7b':  (dict(SMOLLM2, rope_theta=1.3e5), 24, 32, 32, 2048, 8192),
}
SHAPES = {name: {**family, **dict(zip(SIZES, sizes))} for name, (family, *sizes) in ROWS.items()}
