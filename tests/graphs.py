"""Runs a script with its flags and says how many graphs it compiled; Inductor's code is left out, and DDP's
buckets are small.

$ python tests/graphs.py train.py --compile=on ...
"""
import functools
import pathlib
import runpy
import sys

import torch
from torch._dynamo.testing import CompileCounterWithBackend

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fp8gpt import distributed  # noqa: E402

counter = CompileCounterWithBackend('aot_eager')
compile_as_usual, leave = torch.compile, distributed.leave
DDP = torch.nn.parallel.DistributedDataParallel
DDP.__init__ = functools.partialmethod(DDP.__init__, bucket_cap_mb=0.01)  # buckets smaller than a small block


def compile_and_count(function, **options):
    return compile_as_usual(function, **{**options, 'backend': counter, 'fullgraph': True})


def leave_and_tell(error=None):
    print(f'{counter.frame_count} graphs', flush=True)
    leave(error)


torch.compile, distributed.leave = compile_and_count, leave_and_tell
sys.argv = sys.argv[1:]
runpy.run_path(str(ROOT / sys.argv[0]), run_name='__main__')
