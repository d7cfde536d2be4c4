"""Who may import whom: imports go one way, frameworks stay in one file, bf16 reaches no FP8."""
import ast

import lint
from conftest import ROOT

FILES = {path.stem: path for path in sorted(ROOT.glob('*.py'))}
FP8 = {'fp8_linear', 'backends', 'fp8_choice', 'fp8', 'measure', 'settle'}
LEAVES = {
    'configurator': set(),
    'tokenizer': {'configurator', 'files'},
    'gpus': set(),
    'files': {'configurator'},
    'shards': {'configurator', 'files'},
    'data': {'configurator', 'shards'},
    'model': {'configurator'},
    'checkpoint': {'configurator', 'files', 'model', 'optim', 'parallel', 'sharding'},
    'lora': {'configurator', 'files', 'model', 'checkpoint', 'tokenizer', 'hf', 'sft'},
    'sharding': {'configurator'},
    'parallel': {'configurator', 'sharding'},
    'optim': {'configurator', 'sharding'},
    'fp8_linear': set(),
    'backends': {'fp8_linear'},
    'fp8_choice': {'fp8_linear', 'backends'},
    'fp8': {'fp8_linear', 'backends', 'fp8_choice'},
}
FRAMEWORKS = {'transformer_engine', 'torchao.float8', 'torchao.prototype'}


def imports(path):
    """Return the modules that a file imports, late ones included, and the packages around them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            parts = name.split('.')
            found.update('.'.join(parts[:i]) for i in range(1, len(parts) + 1))
    return found


IMPORTS = {path: imports(path) for path in lint.CODE}
OURS = {name: IMPORTS[path] & FILES.keys() for name, path in FILES.items()}


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
    """Each leaf imports only what is below it, and no file reaches itself."""
    wrong = {name: OURS[name] - LEAVES[name] for name in LEAVES if not OURS[name] <= LEAVES[name]}
    wrong |= {name: 'reaches itself' for name in OURS if any(name in reached(other) for other in OURS[name])}
    assert wrong == {}


def test_bf16_reaches_no_fp8():
    """The bf16 loop reaches it by the plan of --dry_run alone."""
    assert {name: reached(name) & FP8 for name in ('resolve', 'sample', 'hellaswag')} == {
        'resolve': set(), 'sample': set(), 'hellaswag': set()}
    assert OURS['train'] & FP8 == set()
    assert {name for name in OURS['train'] if reached(name) & FP8} == {'plan'}


def test_frameworks_are_imported_in_one_file():
    assert [path.name for path, found in IMPORTS.items() if found & FRAMEWORKS] == ['backends.py']


def test_preparing_data_needs_no_torch():
    """data.py's loader imports it late."""
    stems = {one for name in ('corpus', 'prepare_data', 'tokenizer', 'configurator') for one in reached(name)}
    paths = [FILES[stem] for stem in stems - {'data'}]
    assert [path.name for path in paths if 'torch' in IMPORTS[path]] == []


def test_lint_finds_a_figure_that_is_not_in_its_file():
    text = '5.6164 in bf16 and 5.6261 in FP8 of 7.3M parameters at 2.8 GHz (results/fineweb_cpu.json)'
    assert lint.missing(text) == ['5.6261']
    assert lint.missing('7.088, 7.08 and 7.99 (results/fp8_head/)') == ['7.99']
    assert lint.missing('5.363, which is a batch\'s (results/fineweb_cpu.json)') == ['5.363']
