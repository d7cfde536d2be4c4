"""Checks pages and code for what a linter of Python does not see; `make lint` runs it after ruff.

$ python tests/lint.py          # prints each finding and exits 1, or prints nothing

- Each measured figure on a page is in a file of results/ that its paragraph names, with hardware, versions
  and commit; or the paragraph names the commit at which it was measured.
- Each script and each page has a row in README.md, and each test that docs/reliability.md names exists.
- A call passes at most five arguments by position, and a line of code holds ten tokens on average at most.
"""
import ast
import csv
import io
import json
import pathlib
import re
import sys
import tokenize

ROOT = pathlib.Path(__file__).resolve().parents[1]
CODE = sorted([*ROOT.glob('*.py'), *ROOT.glob('fp8gpt/**/*.py')])
PAGES = sorted(path for pattern in ('README.md', 'docs/*.md', 'config/*.py', 'config/*.yaml')
               for path in ROOT.glob(pattern) if path.name != 'log.md')     # it says what its figures are of
MACHINES = r'Xeon|EPYC'                  # a paragraph that names one prints what was measured there
FILES = r'results/[\w./-]+?(?:\.(?:json|csv)|/(?![\w-]))'                   # or a folder of them
COMMIT = r'commit [0-9a-f]{7}\b'
FIGURE = r'(?<![\w./-])[-+]?\d[\d,]*\.\d+(?![\w.]*\d)'
SIZES = r'(?<![\w.])\d[\d.,]*(?:M\b|B\b|K\b| GHz| GB| nats in| s\b| h\b)|--\S+|https?:\S+|arXiv \S+'


def paragraphs(path):
    """Return a page's paragraphs, each with the tables after it, or the comment at the head of a config."""
    text = path.read_text()
    if path.suffix != '.md':
        return [re.split(r'\n(?!#)', text)[0]]
    found = []
    for block in re.split(r'\n\s*\n', re.sub(r'```.*?```', '', text, flags=re.DOTALL)):
        if found and block.lstrip().startswith('|'):
            found[-1] += '\n' + block
        else:
            found.append(block)
    return found


def numbers(path):
    """Return all numbers in a JSON or CSV file of results/, or in a folder of them. Losses of single training
    steps and single runs of a benchmark are left out: any figure of two digits is among those."""
    def walk(value):
        if isinstance(value, dict):
            value = [*(value[name] for name in value if name not in ('train', 'train_loss', 'runs')), *value]
        if isinstance(value, list):
            return [number for item in value for number in walk(item)]
        try:
            return [float(value)]
        except (TypeError, ValueError):
            return []

    if path.endswith('/'):
        return [number for file in (ROOT / path).glob('*.json') for number in numbers(f'{path}{file.name}')]
    with open(ROOT / path, newline='') as file:
        return walk(json.load(file) if path.endswith('.json') else list(csv.reader(file)))


def missing(paragraph):
    """Return the figures of a paragraph that no file it names has, to as many digits as are printed."""
    known = [number for path in sorted(set(re.findall(FILES, paragraph))) for number in numbers(path)]
    lost = []
    for text in re.findall(FIGURE, re.sub(SIZES, '', paragraph)):
        figure, digits = float(text.replace(',', '')), len(text.split('.')[1])
        if not any(abs(abs(number) - abs(figure)) <= 0.500001 * 10**-digits for number in known):
            lost.append(text)
    return lost


def measured():
    """Yield what is wrong with the figures on pages, and with the files of results/."""
    for path in PAGES:
        for paragraph in paragraphs(path):
            start = f'{path.name}: {paragraph.strip()[:60]!r}'
            if re.search(MACHINES, paragraph) and not re.search(f'{FILES}|{COMMIT}', paragraph):
                yield f'{start} names a machine, but neither a file of results/ nor a commit'
            if re.search(FILES, paragraph) and (lost := missing(paragraph)):
                yield f'{start} prints {", ".join(lost)}, which its files do not have'
    for path in sorted((ROOT / 'results').rglob('*.json')):
        result = json.loads(path.read_text())
        for made in [result] if 'device' in result else result.values():
            versions = made.get('versions', {})
            if not (made.get('device') and versions.get('torch')
                    and re.fullmatch(r'[0-9a-f]{7,}', versions.get('commit', ''))):
                yield f'{path.name} lacks device, versions.torch or a clean versions.commit'


def listed():
    """Yield files without a row in README.md, and tests that docs/reliability.md names and nobody wrote."""
    readme = (ROOT / 'README.md').read_text()
    scripts = (path.name for path in ROOT.glob('*.py'))
    yield from (f'README.md does not mention {name}' for name in scripts if name not in readme)
    for page in sorted((ROOT / 'docs').glob('*.md')):
        if f'\n| [docs/{page.name}](docs/{page.name}) | ' not in readme:
            yield f'README.md has no row for docs/{page.name}'
    promises = (ROOT / 'docs' / 'reliability.md').read_text()
    for file, test in re.findall(r'(test_\w+\.py)::(test_\w+)', promises):
        path = ROOT / 'tests' / file
        if not path.exists() or f'def {test}(' not in path.read_text():
            yield f'docs/reliability.md names {file}::{test}, which does not exist'


SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
          tokenize.ENDMARKER}


def code_tokens(text):
    """Yield (first line, last line) of each token of a source that is no comment, line end or indentation.

    An f-string is one token, as `tokenize` has it before Python 3.12. Since then it is many: an FSTRING_START
    and an FSTRING_END, with strings, names and other f-strings between them; since 3.14 a t-string likewise.
    """
    starts = {getattr(tokenize, name, -1) for name in ('FSTRING_START', 'TSTRING_START')}
    ends = {getattr(tokenize, name, -1) for name in ('FSTRING_END', 'TSTRING_END')}
    begun = []      # the first line of each f-string that has not ended: one may stand in another
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        first = token.start[0]
        if token.type in starts:
            begun.append(first)
        elif token.type in ends:
            first = begun.pop()
        if not begun and token.type not in SILENT:
            yield first, token.end[0]


def readable():
    """Yield calls with many arguments, and a line about the tokens of a line of code (nanoGPT has 8.9)."""
    lines, tokens = set(), 0
    for path in CODE:
        text, strings = path.read_text(), set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):     # a docstring
                strings.update(range(node.lineno, node.end_lineno + 1))
            elif isinstance(node, ast.Call) and sum(type(arg) is not ast.Starred for arg in node.args) > 5:
                yield f'{path.name}:{node.lineno}: more than five arguments by position'
        for first, last in code_tokens(text):
            if first not in strings:
                lines.update((path, number) for number in range(first, last + 1))
                tokens += 1
    if tokens > 10 * len(lines):
        yield f'{tokens / len(lines):.1f} tokens a line of code'


if __name__ == '__main__':
    found = [*measured(), *listed(), *readable()]
    print(*found, sep='\n', end='\n' * bool(found))
    sys.exit(bool(found))
