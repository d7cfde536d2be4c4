"""What this machine can do in FP8: GPUs, driver, packages, a real multiplication, what is missing.

diagnose.py prints it: `report`, or, where torch does not load, `report_without_torch`.
"""
import contextlib
import functools
import importlib.metadata
import itertools
import os
import platform
import re
import shutil
import subprocess


try:
    import torch

    from fp8gpt import fp8
    from fp8gpt import runlog
    from fp8gpt.fp8 import health
    from fp8gpt.fp8.linear import emulated_mm, quantizers, scaled_mm
    from fp8gpt.runlog import device_name, find_gpu
    no_torch = None
except (ImportError, OSError, AttributeError) as error:
    # not installed; its CUDA libraries are missing; older than 2.11
    no_torch = str(error).splitlines()[0]

TOKENS = 8192                       # of a micro-batch; a multiple of what any recipe wants
BACKENDS = ('te', 'torchao', 'native', 'emulate')
PACKAGES = ('transformer_engine', 'torchao', 'tiktoken', 'datasets')
REQUIRED = ('tiktoken', 'datasets', 'numpy', 'tensorboard', 'tqdm', 'pyyaml', 'matplotlib')
# CUDA's major version -> its oldest driver (CUDA Toolkit release notes, minor version compatibility)
DRIVERS = {'12': 525, '13': 580}
FP8_UNITS = (8, 9)                  # sm_89
# of nvidia-smi; drivers before 510 know no compute_cap
QUERIES = ('name,driver_version,compute_cap', 'name,driver_version')
CUDA_VERSION = re.compile(r'CUDA[\w ]*Version: *([\d.]+)')


# ------------------------------------------------------------------------------ what is here

def version(package):
    """An installed package's version, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)


def nvidia_smi():
    """Return [{'name', 'capability': (major, minor) or None, 'driver', 'cuda': the latest that the driver
    knows}] of the GPUs that nvidia-smi names; [] where it does not answer."""
    for query in QUERIES:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            rows = ask_nvidia_smi(f'--query-gpu={query}', '--format=csv,noheader').strip()
            cuda = CUDA_VERSION.search(ask_nvidia_smi())
            latest = cuda[1] if cuda else 'unknown'
            return [{**read_row(row), 'cuda': latest} for row in rows.splitlines()]
    return []


def ask_nvidia_smi(*words):
    command = ['nvidia-smi', *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def read_row(row):
    """Return a dict of 'name, driver, 9.0' or 'name, driver'."""
    name, driver, *capability = (word.strip() for word in row.split(','))
    found = {'name': name, 'capability': None, 'driver': driver}
    if '.' in ''.join(capability):
        found['capability'] = tuple(map(int, capability[0].split('.')))
    return found


def find_gpus(smi):
    """[{'name', 'capability', 'GB', 'bf16' and 'fp8': dense TFLOP/s}], as torch sees them, else
    nvidia-smi; what is not known is None."""
    found = [(gpu['name'], gpu['capability'], None) for gpu in smi]
    if torch.cuda.is_available():
        each = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        found = [(gpu.name, (gpu.major, gpu.minor), gpu.total_memory / 1e9) for gpu in each]
    gpus = []
    for name, capability, size in found:
        row = find_gpu(name)
        gpus.append({
            'name': name,
            'capability': capability,
            'GB': size,
            'bf16': row and row.bf16,
            'fp8': row and row.fp8,
        })
    return gpus


def have_fp8_units(gpus):
    """Whether one of find_gpus' has FP8 units."""
    return any((gpu['capability'] or (0, 0)) >= FP8_UNITS for gpu in gpus)


def torch_problem(smi):
    """Why torch does not reach a GPU, with what mends it, in a line; None where it does, or was not
    built to."""
    cuda = torch.version.cuda
    if smi and not cuda and not torch.version.hip:
        return (f'torch {torch.__version__} is built without CUDA, '
                f'though nvidia-smi finds {smi[0]["name"]}: '
                'pip uninstall -y torch && pip install "torch>=2.11"')
    if not cuda or torch.cuda.is_available():
        return None
    why = 'it gives no reason'
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].rstrip('.')
    here = 'nvidia-smi does not answer (a container wants --gpus all)'
    if smi:
        here = f'driver {smi[0]["driver"]}, for CUDA up to {smi[0]["cuda"]}'
    needed = DRIVERS.get(cuda.split('.')[0], 'of its own release')
    line = (f'torch is built for CUDA {cuda}, but torch.cuda.is_available() is False: '
            f'driver not found or too old. torch: {why}. '
            f'Here: {here}; CUDA {cuda} needs driver {needed} or later')
    hidden = os.environ.get('CUDA_VISIBLE_DEVICES')
    if hidden is not None:
        line += f'; CUDA_VISIBLE_DEVICES={hidden!r} may hide GPUs'
    return line


# ------------------------------------------------------------------------------ what runs

def choose(device, tokens=TOKENS, compiling=False, **options):
    """fp8.choose's Choice of these fp8.Options. Raises UserError where they are an order that cannot
    run here."""
    return fp8.choose(fp8.Options(**options), fp8.Place(device, tokens, compiling))


def matrix(device):
    """{'backend recipe': 'yes' where it runs here, else why not}."""
    cells = {}
    for backend, recipe in itertools.product(BACKENDS, fp8.RECIPES):
        cell = f'{backend} {recipe}'
        try:
            choose(device, backend=backend, recipe=recipe)
            cells[cell] = 'yes'
        except (fp8.OptionError, fp8.DeviceError) as error:
            order = f'fp8_backend={backend} fp8_recipe={recipe}: '
            cells[cell] = str(error).removeprefix(order)
    return cells


def matrix_lines(cells):
    """The matrix as a table, a row for each backend, and its numbered reasons."""
    marks = {'yes': 'yes'}
    for reason in cells.values():
        marks.setdefault(reason, f'[{len(marks)}]')
    rows = [('backend', *fp8.RECIPES)]
    for backend in BACKENDS:
        words = (marks[cells[f'{backend} {recipe}']] for recipe in fp8.RECIPES)
        rows.append((backend, *words))
    lines = []
    for first, *words in rows:
        padded = ''.join(f'{word:<15}' for word in words)
        lines.append(f'{first:<10}{padded}'.rstrip())
    del marks['yes']
    return lines + [f'{mark} {reason}' for reason, mark in marks.items()]


def gemm(device, shape, mm, calls):
    """A multiplication (M, K) x (K, N) of normal data, in bf16 and by mm, in turns of so many
    calls.

    shape: (M, K, N). mm: fp8/linear.py's emulated_mm or scaled_mm, of operands cast beforehand with
    one scale a tensor. Returns {'shape', 'bf16', 'fp8': TFLOP/s, 'bf16_error', 'fp8_error':
    relative norms of the difference from fp32}."""
    M, K, N = shape
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(M, K, device=device, generator=generator)
    w = torch.randn(N, K, device=device, generator=generator)
    exact = x @ w.t()
    of = quantizers('tensorwise', 'hybrid')
    x8, w8 = of.x(x), of.w(w)
    ways = {
        'bf16': functools.partial(torch.matmul, x.bfloat16(), w.bfloat16().t()),
        'fp8': functools.partial(mm, x8, w8, torch.bfloat16, fast=True),
    }
    seconds = health.medians(ways, times=calls)
    result = {'shape': list(shape)}
    for name, way in ways.items():
        difference = way().float() - exact
        result[name] = 2 * M * K * N / seconds[name] / 1e12
        result[f'{name}_error'] = (difference.norm() / exact.norm()).item()
    return result


def multiply(device):
    """(a line about a real FP8 multiplication, gemm's figures or None where it failed)."""
    has_units = device.type == 'cuda' and torch.cuda.get_device_capability(device) >= FP8_UNITS
    try:
        if has_units:
            result = gemm(device, (8192, 4096, 4096), scaled_mm, calls=10)
        else:
            result = gemm(device, (512, 256, 256), emulated_mm, calls=1)
    except RuntimeError as error:  # also where the memory is taken
        return f'failed: {str(error).splitlines()[0]}', None
    bf16, in_fp8 = result['bf16'], result['fp8']
    line = '{} x {} x {}, '.format(*result['shape'])
    if has_units:
        line += f'TFLOP/s: {bf16:.0f} bf16, {in_fp8:.0f} FP8, ratio {in_fp8 / bf16:.2f}; '
    line += f'error against fp32: {result["fp8_error"]:.2%} FP8, {result["bf16_error"]:.2%} bf16'
    if not has_units:
        owner = 'A CPU\'s' if device.type == 'cpu' else 'This GPU\'s'
        line += f'. {owner} FP8 is an emulation: it shows the numerics, not the speed'
    return line, result


# ------------------------------------------------------------------------------ the report

def say(name, text):
    print(f'{name:<10}{text}', flush=True)


def gpu_line(gpu):
    words = [gpu['name'], 'sm_{}{}'.format(*gpu['capability'] or '??')]
    if gpu['GB']:
        words.append(f'{gpu["GB"]:.0f} GB')
    if gpu['bf16']:
        words.append(f'dense peaks in TFLOP/s: {gpu["bf16"]} bf16, {gpu["fp8"] or "no"} FP8')
    else:
        words.append('not in runlog.py\'s table, so no MFU')
    return ', '.join(words)


def say_hardware(device, gpus, smi):
    for number, gpu in enumerate(gpus):
        say(f'GPU {number}', gpu_line(gpu))
    if not gpus:
        say('GPU', f'none that nvidia-smi or torch finds; {device_name(device)}')
    if smi:
        say('driver', f'{smi[0]["driver"]}, for CUDA up to {smi[0]["cuda"]}')
    else:
        say('driver', 'nvidia-smi does not answer')


def say_software(packages):
    """packages: name -> version or None."""
    build = 'the CPU alone'
    if torch.version.cuda:
        build = f'CUDA {torch.version.cuda}'
    elif torch.version.hip:
        build = f'ROCm {torch.version.hip}'
    available = f'torch.cuda.is_available() is {torch.cuda.is_available()}'
    say('torch', f'{torch.__version__}, built for {build}; {available}')
    found = [f'Python {platform.python_version()}']
    for name, number in packages.items():
        found.append(f'{name} {number or "not installed"}')
    say('packages', ', '.join(found))
    disk = shutil.disk_usage('.')
    free = f'{disk.free / 1e9:.0f} of {disk.total / 1e9:.0f} GB are free'
    say('disk', f'{free} in {os.getcwd()}; /dev/shm is not needed')


def to_do(smi, gpus, cells):
    """What is wrong or missing, each in a line with the command that mends it. cells: of matrix."""
    problem = torch_problem(smi)
    lines = [problem] if problem else []
    te_loads = version('transformer_engine') and 'does not load' not in cells['te tensorwise']
    if have_fp8_units(gpus) and not te_loads:
        command = 'pip install --no-build-isolation -r requirements-te.txt'
        lines.append(f'Transformer Engine (backend te): {command}')
    if not version('torchao'):
        lines.append('torchao (backend torchao): pip install torchao')
    missing = [package for package in REQUIRED if not version(package)]
    if missing:
        lines.append(f'{", ".join(missing)}: pip install -r requirements.txt')
    return lines


def verdict(choices, gpus, device):
    """The last line. choices: of compile 'on' and 'off'."""
    on, off = choices['on'], choices['off']
    if on.on:
        line = f'FP8 trains here: {on.backend} ({on.reason})'
        if off.backend != on.backend:
            line += f'; without torch.compile: {off.backend}'
        return line
    if have_fp8_units(gpus):
        why = f'FP8 does not run: {on.reason}'
        if not torch.cuda.is_available():
            why = 'torch does not reach it: see "to do"'
        return f'there is a GPU with FP8 units, but {why}'
    backend = 'native' if device.type == 'cpu' else 'emulate'
    return ('no FP8 units here: training runs in bf16; '
            f'--fp8_backend={backend} emulates FP8\'s numerics')


def report(device):
    """Prints what this machine can do; returns it as a dict."""
    smi = nvidia_smi()
    gpus, cells = find_gpus(smi), matrix(device)
    packages = {name: version(name) for name in PACKAGES}
    choices = {}
    for compiling in ('on', 'off'):
        choices[compiling] = choose(device, backend='auto', compiling=compiling == 'on')
    say_hardware(device, gpus, smi)
    say_software(packages)
    for compiling, choice in choices.items():
        backend = choice.backend if choice.on else 'bf16'
        say('auto', f'{backend} with compile={compiling} ({choice.reason})')
    line, figures = multiply(device)
    say('multiply', line)
    print('', *matrix_lines(cells), '', sep='\n')
    todos = to_do(smi, gpus, cells)
    for todo in todos:
        say('to do', todo)
    last = verdict(choices, gpus, device)
    print(last)
    return {
        'gpus': gpus,
        'nvidia_smi': smi,
        'versions': runlog.versions() | packages,
        'cuda': torch.version.cuda,
        'gemm': figures,
        'auto': {compiling: vars(choice) for compiling, choice in choices.items()},
        'to do': todos,
        'verdict': last,
        'matrix': cells,
    }


def report_without_torch():
    """Prints what can be known where torch does not load."""
    smi = nvidia_smi()
    wanted = '"torch>=2.11"' if smi else '"torch>=2.11,<2.14"'
    say('GPU', smi[0]['name'] if smi else 'none that nvidia-smi finds')
    say('Python', platform.python_version())
    say('torch', f'does not load: {no_torch}')
    say('to do', f'make install, or: pip install {wanted} && pip install -r requirements.txt')
    print('nothing trains here yet')
