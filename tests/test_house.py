"""Who may import whom: imports go one way, frameworks stay in one file, bf16 reaches no FP8."""
import ast

import lint
from conftest import ROOT

FRAMEWORKS = {'transformer_engine', 'torchao.float8', 'torchao.prototype'}


def name_of(path):
    """Return a file's name as a module: fp8gpt/fp8/__init__.py is fp8gpt.fp8."""
    return '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')


def imports(path, late=True):
    """Return the modules that a file imports, with those inside functions if late, and their packages."""
    found, tree = set(), ast.parse(path.read_text())
    for node in ast.walk(tree) if late else tree.body:
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


def reached(name, ours=OURS):
    """Return all of ours that importing a file may import, itself included."""
    found, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += ours[one]
    return found


def test_imports_go_one_way():
    """No file reaches itself by what it imports at its start; FP8's files import nothing else of ours."""
    at_start = {name_of(path): imports(path, late=False) & IMPORTS.keys() for path in lint.CODE}
    below = {name: {one for one in found if not name.startswith(one)} for name, found in at_start.items()}
    for name in below:
        assert name not in {one for other in below[name] for one in reached(other, below)}, name
        if name.startswith('fp8gpt.fp8'):
            assert not [other for other in OURS[name] if not other.startswith('fp8gpt.fp8')], name


def test_bf16_reaches_no_fp8():
    """Importing what the bf16 scripts import brings no FP8. test_training.py runs them without FP8."""
    at_start = {name_of(path): imports(path, late=False) & IMPORTS.keys() for path in lint.CODE}
    for name in ('train', 'fp8gpt.run', 'sample', 'hellaswag'):
        assert not [other for other in reached(name, at_start) if other.startswith('fp8gpt.fp8')], name


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
