"""The GPUs that nvidia-smi names. Without torch, whose import takes seconds, or fails."""
import contextlib
import re
import subprocess

FP8_UNITS = (8, 9)                  # sm_89
# drivers before 510 know no compute_cap
QUERIES = ('name,driver_version,compute_cap', 'name,driver_version')
CUDA_VERSION = re.compile(r'CUDA[\w ]*Version: *([\d.]+)')


def nvidia_smi():
    """[{'name', 'capability': (major, minor) or None, 'driver', 'cuda': the latest that the driver
    knows}] of the GPUs that nvidia-smi names; [] where it does not answer."""
    for query in QUERIES:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            rows = _ask_nvidia_smi(f'--query-gpu={query}', '--format=csv,noheader').strip()
            cuda = CUDA_VERSION.search(_ask_nvidia_smi())
            latest = cuda[1] if cuda else 'unknown'
            return [{**_read_row(row), 'cuda': latest} for row in rows.splitlines()]
    return []


def _ask_nvidia_smi(*words):
    command = ['nvidia-smi', *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def _read_row(row):
    """'name, driver, 9.0' or 'name, driver' -> dict."""
    name, driver, *capability = (word.strip() for word in row.split(','))
    found = {'name': name, 'capability': None, 'driver': driver}
    if '.' in ''.join(capability):
        found['capability'] = tuple(map(int, capability[0].split('.')))
    return found
