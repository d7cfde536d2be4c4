"""Print what a block of GPT-2 124M asks of a GPU at 32 x 1,024 tokens: {name: [GB, launches, stores]}.

$ python tests/counted_blocks.py h200 bf16 tensorwise 'delayed triton' fp8_head
"""
import json
import re
import sys

from fp8gpt import fp8
from fp8gpt import kernels, pretended
from fp8gpt.bench_rows import resolved

FP8_POINTER = re.compile(r"'(\w+)': '\*fp8")
STORE = re.compile(r'tl\.store\((\w+) \+ \((.*?)\), ')


def scattered(source):
    """[kernel] of FP8 stores whose fastest index is not contiguous: bytes far apart, which no count of bytes
    shows."""
    found = []
    for name, kernel in pretended.TRITON_KERNEL.findall(source):
        inner = 'r0_1' if 'r0_1' in kernel else 'x0'
        for pointer, index in STORE.findall(kernel):
            stride = re.search(rf'(\d+)\*\(?\(?{inner}\b', index)
            if pointer in FP8_POINTER.findall(kernel) and stride and int(stride[1]) > 1:
                found.append(name)
    return found


def figures(words, name):
    run = resolved(words)
    recipe, _, own = name.partition(' ')
    piece, choice = 'block', fp8.OFF
    if name.endswith('head'):
        piece, choice = 'head and loss', fp8.Choice('native', head=name == 'fp8 head', reason='counted')
    elif name != 'bf16':
        choice = fp8.Choice('native', recipe, kernels=own or 'inductor', reason='counted',
                            format=fp8.RECIPES[recipe].format)
    graphs = kernels.code_of_model(run.window_config, run.batch_size, choice, only=piece)[piece]
    gigabytes, launches, _ = kernels.total(graphs)
    return gigabytes, int(launches), [kernel for graph in graphs for kernel in scattered(graph.source)]


if __name__ == '__main__':
    gpu, *names = sys.argv[1:]
    pretended.pretend(gpu)
    words = ['config/gpt2_fp8.py', '--batch_size=32', '--device=cpu']
    print(json.dumps({name: figures(words, name) for name in names}))
