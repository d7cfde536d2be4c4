"""Runs a script as if its host had no memory to gather a checkpoint in.

$ python tests/small_host.py train.py --sharding_mode=fsdp_full ...
"""
import pathlib
import runpy
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fp8gpt import checkpoint  # noqa: E402

checkpoint.host_bytes = lambda: 1000
sys.argv = sys.argv[1:]
runpy.run_path(str(ROOT / sys.argv[0]), run_name='__main__')
