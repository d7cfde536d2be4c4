"""The shape of the repository: who may import whom, and what keeps a file readable."""
import ast
import io
import re
import tokenize

import pytest

from conftest import ROOT

FILES = sorted(ROOT.glob('*.py'))
FOLDERS = ('benchmarks', 'fp8_kernels', 'hf_parts', 'planning')
READ = [*FILES, *(path for folder in FOLDERS for path in sorted(ROOT.glob(f'{folder}/*.py')))]
FP8 = {'fp8_linear', 'backends', 'fp8_choice', 'fp8', 'measure', 'settle'}
LEAVES = {
    'errors': set(),
    'usage': {'errors'},
    'configurator': {'errors', 'usage'},
    'tokenizer': {'configurator', 'files'},
    'generation': set(),
    'gpus': set(),
    'files': {'configurator'},
    'shards': {'configurator', 'files'},
    'data': {'configurator', 'shards'},
    'loss': set(),
    'model': {'configurator', 'loss'},
    'checkpoint': {'configurator', 'files', 'model', 'optim', 'parallel', 'sharding'},
    'lora': {'configurator', 'files', 'model', 'checkpoint', 'tokenizer', 'hf', 'sft'},
    'sharding': {'configurator'},
    'parallel': {'configurator', 'errors', 'sharding'},
    'optim': {'configurator', 'sharding'},
    'fp8_linear': {'model'},
    'backends': {'configurator', 'fp8_linear', 'model'},
    'fp8_choice': {'configurator', 'fp8_linear', 'backends'},
    'fp8': {'configurator', 'fp8_linear', 'backends', 'fp8_choice'},
}
FRAMEWORKS = {'transformer_engine', 'torchao.float8', 'torchao.prototype'}


def tree(path):
    return ast.parse(path.read_text())


def imports(path):
    """The modules that a file imports, late ones included, and the packages around them."""
    found = set()
    for node in ast.walk(tree(path)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            parts = name.split('.')
            found.update('.'.join(parts[:i]) for i in range(1, len(parts) + 1))
    return found


OURS = {path.stem: imports(path) & {path.stem for path in FILES} for path in FILES}


def reached(name):
    """All of ours that importing a file may import, itself included."""
    found, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += OURS[one]
    return found


@pytest.mark.parametrize('name', LEAVES)
def test_a_leaf_imports_what_is_below_it(name):
    assert OURS[name] <= LEAVES[name]


def test_imports_go_one_way():
    for name in OURS:
        above = {other for other in OURS if name in reached(other)}
        assert reached(name) & above == {name}, f'{name} is in a circle'


@pytest.mark.parametrize('name', ['resolve', 'sample', 'hellaswag'])
def test_what_bf16_stands_on_reaches_no_fp8(name):
    assert not reached(name) & FP8


def test_the_bf16_loop_reaches_fp8_by_the_plan_of_a_dry_run_alone():
    assert OURS['train'] & FP8 == set()
    assert {name for name in OURS['train'] if reached(name) & FP8} == {'plan'}


def test_frameworks_are_imported_in_one_room():
    importers = {path.stem for path in FILES if imports(path) & FRAMEWORKS}
    assert importers == {'backends'}


@pytest.mark.parametrize('name', ['corpus', 'prepare_data', 'tokenizer', 'configurator'])
def test_preparing_data_needs_no_torch(name):
    """data.py's loader imports it late."""
    for one in reached(name) - {'data'}:
        assert 'torch' not in imports(ROOT / f'{one}.py')


# ------------------------------------------------------------------------------------------------ readability

def code_lines(path):
    """(code lines, their tokens): neither comments nor docstrings nor blank lines count."""
    strings = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            strings.update(range(node.lineno, node.end_lineno + 1))
    silent = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT
    lines, tokens = set(), 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (*silent, tokenize.ENDMARKER) or token.start[0] in strings:
            continue
        lines.update(range(token.start[0], token.end[0] + 1))
        tokens += 1
    return len(lines), tokens


def size(path):
    return len(path.read_text().splitlines())


def test_the_core_is_read_in_an_hour():
    lines = [(ROOT / name).read_text().splitlines() for name in ('train.py', 'train_fp8.py')]
    inserted = len(lines[1]) - len(lines[0])
    core = sum(size(ROOT / name) for name in ('model.py', 'loss.py', 'train.py', 'fp8_linear.py'))
    assert core + inserted <= 1280


@pytest.mark.parametrize('path', READ, ids=lambda path: path.name)
def test_a_file_is_read_in_one_sitting(path):
    assert size(path) <= 450


def test_there_are_few_files():
    assert len(FILES) <= 39


def test_a_line_holds_one_idea():
    """nanoGPT has 8.9 tokens a line."""
    counts = [code_lines(path) for path in READ]
    assert sum(tokens for _, tokens in counts) / sum(lines for lines, _ in counts) <= 10


@pytest.mark.parametrize('path', READ, ids=lambda path: path.name)
def test_a_call_names_its_arguments(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
            assert len(plain) <= 5, f'{path.name}:{node.lineno}'


def test_each_promise_names_tests_that_there_are():
    named = re.findall(r'(test_\w+\.py)::(test_\w+)', (ROOT / 'docs' / 'reliability.md').read_text())
    assert len(named) > 20
    for file, test in named:
        assert f'def {test}(' in (ROOT / 'tests' / file).read_text(), f'{file}::{test}'


def test_every_file_has_a_place_in_the_readme():
    readme = (ROOT / 'README.md').read_text()
    for path in READ:
        assert path.name in readme
