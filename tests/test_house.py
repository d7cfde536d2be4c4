"""Who may import whom: imports go one way, frameworks stay in one file, bf16 reaches no FP8."""
import ast

import lint
from lint import ROOT

FRAMEWORKS = 'transformer_engine', 'torchao.float8', 'torchao.prototype'
BELOW_THE_LIBRARY = {'model', 'configurator'}   # the files of the root that fp8gpt/ may import


def name_of(path):
    """Return a file's name as a module: fp8gpt/fp8/__init__.py is fp8gpt.fp8."""
    return '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')


def imports(path, late=True):
    """Return the modules that a file imports, and names in them; with those inside functions if late."""
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
        found.update(names)
    return found - {'fp8gpt'}


IMPORTS = {name_of(path): imports(path) for path in lint.CODE}
OURS = {name: found & IMPORTS.keys() - {name} for name, found in IMPORTS.items()}
AT_START = {name_of(path): imports(path, late=False) & IMPORTS.keys() for path in lint.CODE}


def reached(name, ours=OURS):
    """Return all of ours that importing a file may import, itself included."""
    found, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += ours[one]
    return found


def test_an_f_string_is_one_token_under_each_python():
    source = """x = f'a {b + c!r:>{width}} {f"d {e}"}' 'g'   # h\nif x:\n    y = f'''i\n{j}'''\n"""
    lines = [(1, 1)] * 4 + [(2, 2)] * 3 + [(3, 3)] * 2 + [(3, 4)]     # x = f'' 'g', if x :, y = f''' '''
    assert list(lint.code_tokens(source)) == lines


def test_no_file_imports_a_file_that_imports_it():
    assert not [name for name in OURS if any(name in reached(other) for other in OURS[name])]


def test_the_library_imports_no_script_and_fp8_nothing_else_of_ours():
    for name, found in OURS.items():
        if name.startswith('fp8gpt.'):
            assert {other for other in found if '.' not in other} <= BELOW_THE_LIBRARY, name
        if name.startswith('fp8gpt.fp8'):
            assert not [other for other in found if not other.startswith('fp8gpt.fp8')], name


def test_the_log_is_a_leaf():
    assert OURS['fp8gpt.runlog'] <= BELOW_THE_LIBRARY - {'model'} | {
        f'fp8gpt.{name}' for name in ('files', 'shards', 'distributed', 'gpus')}


def test_bf16_reaches_no_fp8():
    """Importing what the bf16 scripts import brings no FP8. test_training.py runs them without FP8."""
    for name in ('train', 'fp8gpt.run', 'sample', 'hellaswag'):
        assert not [other for other in reached(name, AT_START) if other.startswith('fp8gpt.fp8')], name


def test_frameworks_are_imported_in_one_file():
    found = [name for name, found in IMPORTS.items() if any(one.startswith(FRAMEWORKS) for one in found)]
    assert found == ['fp8gpt.fp8.backends']


def test_preparing_data_needs_no_torch():
    names = reached('prepare_data')
    need_torch = {name for name in names if any(one.split('.')[0] == 'torch' for one in IMPORTS[name])}
    assert need_torch <= {'fp8gpt.data'}
