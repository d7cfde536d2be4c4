"""Every measured figure that a page prints is in a file of results/, with hardware, versions and commit, or
names the commit that it was measured at."""
import csv
import json
import re

import pytest

from conftest import ROOT

MACHINES = r'Xeon|EPYC'                  # a block that names one tells what was measured there
FILES = r'results/[\w./-]+?(?:\.(?:json|csv)|/(?![\w-]))'            # or a folder of them
COMMIT = r'commit [0-9a-f]{7}\b'
FIGURE = r'(?<![\w./-])[-+]?\d[\d,]*\.\d+(?![\w.]*\d)'
SIZES = r'(?<![\w.])\d[\d.,]*(?:M\b|B\b|K\b| GHz| GB| nats in| s\b| h\b)|--\S+|https?:\S+|arXiv \S+'
PAGES = sorted(path for pattern in ('README.md', 'docs/*.md', 'config/*.py', 'config/*.yaml')
               for path in ROOT.glob(pattern) if path.name != 'log.md')  # which says what its figures are of


def blocks(path):
    """Paragraphs of a page, each with the tables behind it, or the comments at a config's head."""
    text = path.read_text()
    if path.suffix != '.md':
        return [re.split(r'\n(?!#)', text)[0]]
    text = re.sub(r'```.*?```', '', text, flags=re.DOTALL)
    found = []
    for block in re.split(r'\n\s*\n', text):
        if found and block.lstrip().startswith('|'):
            found[-1] += '\n' + block
        else:
            found.append(block)
    return found


def numbers(path):
    """All numbers in a JSON or CSV of results/, or in those of a folder, but for training losses of single
    steps and a benchmark's single runs: among these any figure of two digits is found."""
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


def missing(block):
    """The figures of a block that are in none of the files that it names: to as many digits as it prints."""
    known = [number for path in sorted(set(re.findall(FILES, block))) for number in numbers(path)]
    lost = []
    for text in re.findall(FIGURE, re.sub(SIZES, '', block)):
        figure, digits = float(text.replace(',', '')), len(text.split('.')[1])
        tolerance = 0.500001 * 10**-digits
        if not any(abs(abs(number) - abs(figure)) <= tolerance for number in known):
            lost.append(text)
    return lost


@pytest.mark.parametrize('path', PAGES, ids=lambda path: path.name)
def test_what_was_measured_names_its_file_or_its_commit(path):
    told = [block for block in blocks(path) if re.search(MACHINES, block)]
    assert [block for block in told if not re.search(f'{FILES}|{COMMIT}', block)] == []


@pytest.mark.parametrize('path', PAGES, ids=lambda path: path.name)
def test_each_measured_figure_is_in_its_file(path):
    found = {block[:60]: missing(block) for block in blocks(path) if re.search(FILES, block)}
    assert {start: lost for start, lost in found.items() if lost} == {}


@pytest.mark.parametrize('path', sorted((ROOT / 'results').rglob('*.json')), ids=lambda path: path.stem)
def test_a_result_names_hardware_versions_and_commit(path):
    result = json.loads(path.read_text())
    for made in [result] if 'device' in result else result.values():
        assert made['device'] and made['versions']['torch']
        assert re.fullmatch(r'[0-9a-f]{7,}', made['versions']['commit'])


def test_a_figure_that_is_not_in_its_file_is_found():
    block = '5.6164 in bf16 and 5.6261 in FP8 of 7.3M parameters at 2.8 GHz (results/fineweb_cpu.json)'
    assert missing(block) == ['5.6261']
    assert missing('7.088, 7.08 and 7.99 (results/fp8_head/)') == ['7.99']
    assert missing('5.363, which is a batch\'s (results/fineweb_cpu.json)') == ['5.363']
