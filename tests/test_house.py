"""Who may import whom: imports go one way, frameworks stay in one file, bf16 reaches no FP8."""
import ast

import lint
from conftest import ROOT

FP8 = {'fp8gpt.measure', 'fp8gpt.settle'}     # and all of fp8gpt.fp8
LEAVES = {
    'configurator': set(),
    'fp8gpt.tokenizer': {'configurator', 'fp8gpt.files'},
    'fp8gpt.gpus': set(),
    'fp8gpt.files': {'configurator'},
    'fp8gpt.shards': {'configurator', 'fp8gpt.files'},
    'fp8gpt.data': {'configurator', 'fp8gpt.shards'},
    'model': {'configurator'},
    'fp8gpt.sharding': {'configurator'},
    'fp8gpt.parallel': {'configurator', 'fp8gpt.sharding'},
    'fp8gpt.optim': {'configurator', 'fp8gpt.sharding'},
    'fp8gpt.checkpoint': {'configurator', 'model', *(f'fp8gpt.{name}' for name in (
        'files', 'optim', 'parallel', 'sharding'))},
    'fp8gpt.fp8.linear': set(),
    'fp8gpt.fp8.backends': {'fp8gpt.fp8.linear', 'fp8gpt.fp8.kernels.head'},
    'fp8gpt.fp8.choice': {'fp8gpt.fp8.linear', 'fp8gpt.fp8.backends'},
    'fp8gpt.fp8.kernels.block': {'model', 'fp8gpt.fp8.linear', *(f'fp8gpt.fp8.kernels.{name}' for name in (
        'casts', 'finish', 'norms'))},
}
FRAMEWORKS = {'transformer_engine', 'torchao.float8', 'torchao.prototype'}


def name_of(path):
    """Return a file's name as a module: fp8gpt/fp8/__init__.py is fp8gpt.fp8."""
    return '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')


def imports(path):
    """Return the modules that a file imports, late ones included, and the packages around them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = [*path.relative_to(ROOT).parts[:-1]] if node.level else []
            parts = parts[:len(parts) - node.level + 1] if node.level > 1 else parts
            start = '.'.join([*parts, *(node.module or '').split('.')]).strip('.')
            names = [start, *(f'{start}.{alias.name}' for alias in node.names)]
        for name in names:
            parts = name.split('.')
            found.update('.'.join(parts[:i]) for i in range(1, len(parts) + 1))
    return found - {'fp8gpt'}


IMPORTS = {name_of(path): imports(path) for path in lint.CODE}
OURS = {name: found & IMPORTS.keys() - {name} for name, found in IMPORTS.items()}


def in_fp8(name):
    return name in FP8 or name.startswith('fp8gpt.fp8')


def reached(name):
    """Return all of ours that importing a file may import, itself included."""
    found, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += OURS[one]
    return found


def test_imports_go_one_way():
    """Each leaf imports only what is below it, a package aside. FP8's rooms import nothing of ours but each
    other; the fused block alone knows the model. hf.py and lora.py know each other, late."""
    packages = {'fp8gpt.fp8', 'fp8gpt.fp8.kernels'}
    wrong = {name: OURS[name] - LEAVES[name] - packages
             for name in LEAVES if not OURS[name] - packages <= LEAVES[name]}
    for name in IMPORTS:
        if name.startswith('fp8gpt.fp8') and name != 'fp8gpt.fp8.kernels.block':
            foreign = {other for other in OURS[name] if not other.startswith('fp8gpt.fp8')}
            wrong |= {name: foreign} if foreign else {}
    late = {'hf', 'fp8gpt.lora', 'fp8gpt.resolve'} | packages
    below = {name for name in OURS if not name.startswith('fp8gpt.fp8') and name not in late}
    wrong |= {name: 'reaches itself' for name in below
              if any(name in reached(other) for other in OURS[name])}
    assert wrong == {}


def test_bf16_reaches_no_fp8():
    """The bf16 loop reaches it by the plan of --dry_run alone."""
    for name in ('fp8gpt.resolve', 'sample', 'hellaswag'):
        assert {other for other in reached(name) if in_fp8(other)} == set(), name
    assert not any(map(in_fp8, OURS['train']))
    assert {name for name in OURS['train'] if any(map(in_fp8, reached(name)))} == {'plan'}


def test_frameworks_are_imported_in_one_file():
    assert [name for name, found in IMPORTS.items() if found & FRAMEWORKS] == ['fp8gpt.fp8.backends']


def test_preparing_data_needs_no_torch():
    """data.py's loader imports it late."""
    names = reached('prepare_data')
    assert [name for name in names - {'fp8gpt.data'} if 'torch' in IMPORTS[name]] == []


def test_lint_finds_a_figure_that_is_not_in_its_file():
    text = '5.6164 in bf16 and 5.6261 in FP8 of 7.3M parameters at 2.8 GHz (results/fineweb_cpu.json)'
    assert lint.missing(text) == ['5.6261']
    assert lint.missing('7.088, 7.08 and 7.99 (results/fp8_head/)') == ['7.99']
    assert lint.missing('5.363, which is a batch\'s (results/fineweb_cpu.json)') == ['5.363']
