"""Small things that several tests use."""
import torch


def random(*shape, seed=0, dtype=torch.bfloat16):
    """Normal values, the same for a seed on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(a, b):
    """|a - b| / |b|, in fp64."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
