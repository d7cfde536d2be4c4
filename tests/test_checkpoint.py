import contextlib
import functools
import io
import itertools
import json
import os
import pathlib
import pickle
import shutil
import time
import types
import warnings
import zipfile
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata

from fp8gpt import checkpoint
from fp8gpt import optim
from fp8gpt.checkpoint import damage, find, load, save, start, steps_in, table
from configurator import UserError
from conftest import run
from damage import survived
from helpers import checkpoint_of
from model import GPT, GPTConfig

MODEL = GPT(GPTConfig(vocab_size=64, block_size=8, n_layer=1, n_head=1, n_embd=16))


def state(step):
    made = checkpoint_of(MODEL, step, best_val_loss=1.5)
    made['weights'] = {**made['weights'], 'wte.weight': torch.arange(1024.).view(64, 16) + step}
    return made


def test_a_checkpoint_from_before_some_fields_is_read(tmp_path):
    older = state(1)
    for name in ('head_dim', 'qkv_bias', 'qk_norm', 'rope_factor', 'rope_low', 'rope_high', 'rope_original'):
        del older['model_config'][name]
    torch.save(older, tmp_path / 'step_000001.pt')
    assert GPTConfig(**load(str(tmp_path / 'step_000001.pt'))['model_config']) == MODEL.config


@pytest.fixture
def folder(tmp_path):
    """A checkpoint_dir, as the scripts give it."""
    return str(tmp_path)


def names(folder):
    """Of the step files."""
    return [os.path.basename(path) for path in steps_in(folder)]


def test_names_links_and_keep(folder, tmp_path):
    for step in (10, 20, 30, 40):
        save(folder, state(step), keep=2, best=step == 20)
    assert names(folder) == ['step_000030.pt', 'step_000040.pt']
    assert os.path.samefile(f'{folder}/latest.pt', f'{folder}/step_000040.pt')
    assert load(f'{folder}/best_model.pt')['step'] == 20
    assert not list(tmp_path.glob('*.tmp'))
    save(folder, state(40), keep=1, best=True)  # the same step again, as best
    assert os.path.samefile(f'{folder}/best_model.pt', f'{folder}/latest.pt')
    assert len(steps_in(folder)) == 1
    assert not list(tmp_path.glob('*.tmp'))
    save(folder, state(50), keep=0)
    assert len(steps_in(folder)) == 2


def test_a_best_model_found_after_its_save_is_a_link_that_knows_its_loss(folder):
    save(folder, state(10), keep=1)
    written = os.stat(f'{folder}/step_000010.pt')
    save(folder, {**state(10), 'best_val_loss': 1.2}, keep=1, best=True)
    assert os.stat(f'{folder}/best_model.pt').st_ino == written.st_ino
    assert os.stat(f'{folder}/best_model.pt').st_mtime_ns == written.st_mtime_ns
    assert load(f'{folder}/best_model.pt')['best_val_loss'] == 1.2
    assert load(f'{folder}/latest.pt')['best_val_loss'] == 1.2
    assert 'best val loss  1.2000' in table(folder)[0]


def test_a_later_best_loss_says_nothing_of_an_earlier_step(folder):
    save(folder, state(10), keep=0)
    save(folder, {**state(20), 'best_val_loss': 1.2}, keep=0, best=True)
    assert load(f'{folder}/step_000010.pt')['best_val_loss'] == 1.5


class Killed(BaseException):
    """No handler of an error sees it, as none sees a kill."""


CALLS = 'replace', 'rename', 'link', 'remove', 'unlink', 'fsync', 'open'


@pytest.fixture
def dying(monkeypatch):
    """dying(work, k, error): whether work() ended by `error`, raised in place of the k-th call of the system
    that changes files, or half-way through writing a checkpoint."""
    def run(work, k, error):
        left = itertools.count(k, -1)

        def counted(real, before=lambda *arguments: None):
            def call(*arguments, **options):
                if next(left) == 0:
                    before(*arguments)
                    raise error
                return real(*arguments, **options)
            return call

        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, counted(getattr(os, name)))
            half = counted(torch.save, before=lambda state, file: file.write(b'PK half of it'))
            patch.setattr(torch, 'save', half)
            try:
                work()
            except (Killed, OSError) as died:
                assert died is error or isinstance(died, UserError)
                return True
        return next(left) < 0
    return run


def test_killed_at_any_call_of_a_save_the_next_run_goes_on(dying, tmp_path, monkeypatch):
    """Two saves of a run, then the one that is killed; a run resumed by auto saves again."""
    monkeypatch.setattr(os, 'fsync', lambda number: None)  # of what a power cut does, this shows nothing
    for best in (False, True):
        for k in itertools.count():
            folder = str(tmp_path / f'{best}-{k}')
            start(folder, None, 0, False).close()
            save(folder, {**state(1), 'best_val_loss': 1.4}, keep=2, best=True)
            save(folder, {**state(2), 'best_val_loss': 1.4}, keep=2)
            third = {**state(3), 'best_val_loss': 1.2}
            if not dying(functools.partial(save, folder, third, 2, best), k, Killed()):
                break
            assert find('auto', folder) == find('latest', folder)
            path = find('auto', folder)
            resumed = load(path)
            assert resumed['step'] in (2, 3)
            told = json.loads((tmp_path / folder / 'best_model.json').read_text())
            assert load(find('best', folder))['step'] == told['step']
            start(folder, path, resumed['step'], False).close()
            assert load(f'{folder}/latest.pt')['step'] == resumed['step']
            assert load(f'{folder}/best_model.pt')['step'] == told['step']
            assert not [name for name in os.listdir(folder) if name.endswith('.tmp')]
            save(folder, state(resumed['step'] + 1), keep=2)
            assert load(find('auto', folder))['step'] == resumed['step'] + 1
            assert load(f'{folder}/best_model.pt')['best_val_loss'] == told['best_val_loss']
        assert k > 10, 'the save dies at several calls'


def test_a_full_disk_at_any_call_of_a_save_is_told_and_the_next_save_works(dying, folder):
    full = OSError(28, 'No space left on device')
    save(folder, {**state(1), 'best_val_loss': 1.4}, keep=2, best=True)
    for k in itertools.count():
        step = k + 2
        better = {**state(step), 'best_val_loss': 1.2}
        if not dying(functools.partial(save, folder, better, 2, True), k, full):
            break
        assert load(find('auto', folder))['step'] in (step - 1, step)
        assert not [name for name in os.listdir(folder) if name.endswith('.tmp')]
        save(folder, state(step), keep=2)
        assert load(find('auto', folder))['step'] == step
        told = json.loads(open(f'{folder}/best_model.json').read())
        assert load(f'{folder}/best_model.pt')['step'] == told['step']
    assert k > 10, 'the save fails at several calls'


def test_a_damaged_newest_step_is_passed_over_and_set_aside(folder, capsys):
    for step in (1, 2, 3):
        save(folder, state(step), keep=0)
    for step, content in ((2, b'PK\3\4'), (3, b'')):
        with open(f'{folder}/step_{step:06d}.pt', 'r+b') as file:
            file.truncate()
            file.write(content)
    path = find('auto', folder)
    assert path == f'{folder}/step_000001.pt'
    start(folder, path, 1, False).close()
    assert load(f'{folder}/latest.pt')['step'] == 1
    assert capsys.readouterr().out.count('set aside as') == 2
    save(folder, state(2), keep=0)
    assert load(find('latest', folder))['step'] == 2


def test_a_new_run_forgets_the_best_loss_of_the_one_before(folder, tmp_path):
    (tmp_path / 'best_model.json').write_text('{"step": 2, "best_val_loss": 0.1}')
    start(folder, None, 0, False).close()
    save(folder, state(2), keep=0, best=True)
    assert load(f'{folder}/latest.pt')['best_val_loss'] == 1.5
    start(folder, None, 0, True).close()
    assert [name for name in os.listdir(folder) if name != '.lock'] == []


def test_a_damaged_best_model_does_not_keep_the_latest_from_being_read(folder, tmp_path):
    save(folder, {**state(10), 'best_val_loss': 1.2}, keep=1, best=True)
    save(folder, state(20), keep=1)
    (tmp_path / 'best_model.pt').write_bytes(b'hello')
    assert load(f'{folder}/latest.pt')['best_val_loss'] == 1.5


def test_what_could_not_be_loaded_is_not_saved(folder):
    from torchao.optim.subclass_8bit import OptimState8bit
    moments = OptimState8bit.zeros((16, 256))
    with pytest.raises(TypeError, match=r"state\['optimizer'\]\['w'\]\['exp_avg'\] is of .*OptimState8bit"):
        save(folder, {**state(1), 'optimizer': {'w': {'exp_avg': moments}}}, keep=0)
    with pytest.raises(TypeError, match=r"state\['shapes'\]\[1\] is of .*set"):
        save(folder, {**state(1), 'shapes': [1, {2}]}, keep=0)
    assert not steps_in(folder)


def test_copies_where_links_fail(folder, monkeypatch):
    def no_links(*args):
        raise OSError('not supported')
    monkeypatch.setattr(os, 'link', no_links)
    save(folder, state(1), keep=1, best=True)
    save(folder, state(2), keep=1)
    assert load(f'{folder}/latest.pt')['step'] == 2
    assert load(f'{folder}/best_model.pt')['step'] == 1


def test_a_failed_write_leaves_what_was_there(folder, monkeypatch):
    save(folder, state(1), keep=1)
    real = torch.save

    def full(state, file):
        real({'half': 1}, file)
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(torch, 'save', full)
    with pytest.raises(OSError, match='could not write .*step_000002.pt .*No space left'):
        save(folder, state(2), keep=1)
    assert sorted(os.listdir(folder)) == ['latest.pt', 'step_000001.pt']
    assert load(f'{folder}/latest.pt')['step'] == 1


def flip(raw):
    """One bit of a weight."""
    spoilt = bytearray(raw)
    at = raw.find(torch.arange(2., 50.).numpy().tobytes())
    spoilt[at + 20] ^= 1
    return spoilt


def test_damage_is_found_and_the_one_before_named(folder, tmp_path):
    save(folder, state(1), keep=0)
    save(folder, state(2), keep=0)
    path = tmp_path / 'step_000002.pt'
    whole = path.read_bytes()
    for spoilt in (flip(whole), whole[:-100], b''):
        (tmp_path / 'new').write_bytes(spoilt)
        os.replace(tmp_path / 'new', path)
        with pytest.raises(OSError, match='step_000002.pt is damaged .*; the one before it is .*000001.pt'):
            load(str(path))
        assert 'step_000002.pt' in '\n'.join(table(folder))


def test_find(folder):
    assert find('', folder) is None
    assert find('auto', folder) is None
    for resume in ('latest', 'best', f'{folder}/step_000001.pt'):
        with pytest.raises(FileNotFoundError, match=f'resume={resume}'):
            find(resume, folder)
    save(folder, state(1), keep=1, best=True)
    assert find('auto', folder) == f'{folder}/latest.pt'
    assert find('latest', folder) == f'{folder}/latest.pt'
    assert find('best', folder) == f'{folder}/best_model.pt'


def test_start_protects_earlier_runs(tmp_path):
    d, other = str(tmp_path / 'a'), str(tmp_path / 'b')
    start(d, None, 0, False).close()
    for step in (1, 2, 3):
        save(d, state(step), keep=0)
    with pytest.raises(ValueError, match='an earlier run, step_000003.pt.*--overwrite'):
        start(d, None, 0, False)
    start(d, f'{d}/latest.pt', 3, False).close()
    with pytest.raises(ValueError, match='later checkpoints, step_000003.pt'):
        start(d, f'{d}/step_000002.pt', 2, False)
    start(d, f'{d}/step_000002.pt', 2, True).close()
    assert names(d) == ['step_000001.pt', 'step_000002.pt']
    start(other, f'{d}/step_000002.pt', 2, False).close()  # a branch elsewhere
    save(other, state(2), keep=0)
    with pytest.raises(ValueError, match='an earlier run'):
        start(other, f'{d}/step_000002.pt', 2, False)


def test_one_run_per_directory(folder, tmp_path):
    (tmp_path / '.lock').write_text('a note')
    held = start(folder, None, 0, False)
    with pytest.raises(OSError, match='another run is writing'):
        start(folder, None, 0, False)
    held.close()
    start(folder, None, 0, False).close()
    assert (tmp_path / '.lock').read_text() == 'a note'


def test_room(folder, monkeypatch):
    usage = types.SimpleNamespace(free=3.5e9)
    monkeypatch.setattr(checkpoint.shutil, 'disk_usage', lambda d: usage)
    assert '4.0 GB' in checkpoint.room_warning(folder, 1e9, 2)
    assert checkpoint.room_warning(folder, 1e9, 1) is None


def test_table(folder, tmp_path):
    assert table(folder) == [f'no checkpoints in {folder}']
    save(folder, state(7), keep=1)
    (tmp_path / 'odd.pt').write_text('not one')
    _, odd, line = table(folder)
    assert 'odd.pt' in odd
    assert 'step      7' in line and '1.5000' in line and time.strftime('%Y') in line


# ------------------------------------------------------------------------------------- what a file may hold

def test_a_damaged_checkpoint_is_told_in_one_line(folder):
    save(folder, state(1), keep=0)
    path = f'{folder}/step_000001.pt'
    whole = load(path)

    def same(read):
        return all(torch.equal(read['weights'][name], w) for name, w in whole['weights'].items())
    assert not survived(path, load, same, cases=400)


def zipped(**members):
    """The bytes of a zip file."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, 'w') as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return raw.getvalue()


class Code:
    """Makes a folder when it is unpickled."""
    def __init__(self, mark='ran'):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def saved(value):
    raw = io.BytesIO()
    torch.save(value, raw)
    return raw.getvalue()


FOREIGN = {
    'text': b'hello',
    'a zip': zipped(a='text'),
    'a pickle': pickle.dumps({'step': 1}),
    'code': saved({**state(1), 'versions': Code()}),
    'code without a zip': pickle.dumps(Code()),
    'a list': saved([1, 2]),
    'a state_dict': saved(torch.nn.Linear(2, 2).state_dict()),
    'a trainer\'s': saved({'model': {}, 'optimizer': {}, 'iter_num': 5}),
    'an older format': io.BytesIO(),
}
torch.save(state(1), FOREIGN['an older format'], _use_new_zipfile_serialization=False)
FOREIGN['an older format'] = FOREIGN['an older format'].getvalue()


def taken(state_or_bytes, path):
    """What a file holds that load takes; None where it refuses it in one line."""
    if isinstance(state_or_bytes, bytes):
        path.write_bytes(state_or_bytes)
    else:
        torch.save(state_or_bytes, path)
    try:
        return load(str(path))
    except UserError as refusal:
        assert f'{path} is no checkpoint of train.py or train_fp8.py' in str(refusal)
        assert '\n' not in str(refusal)
        return None


def test_another_programs_file_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [what for what, raw in FOREIGN.items() if taken(raw, tmp_path / 'theirs.pt')] == []
    assert not (tmp_path / 'ran').exists()


def nested(value, path=()):
    """Paths of keys to what a checkpoint's dicts hold; of one weight alone."""
    for key, item in value.items():
        if key in MODEL.weights() and key != 'wte.weight':
            continue
        yield (*path, key)
        if isinstance(item, dict):
            yield from nested(item, (*path, key))


def without(made, path):
    """A copy of nested dicts that lacks what is at a path, and the dict where it would be."""
    copy = dict(made)
    inner = copy
    for key in path[:-1]:
        inner[key] = dict(inner[key])
        inner = inner[key]
    del inner[path[-1]]
    return copy, inner


NEEDED = [path for path in nested(state(1)) if path[0] != 'model_config']
TYPED = [path for path in nested(state(1)) if path[0] != 'versions']
BOOLEANS = 'bias', 'tie_embeddings', 'qkv_bias'     # which may be True, and fit these weights then


def test_a_checkpoint_that_lacks_a_part_or_has_one_of_another_type_is_refused(tmp_path):
    wrong = [path for path in NEEDED if taken(without(state(1), path)[0], tmp_path / 'x.pt')]
    for path in TYPED:
        for value in ([1], True, torch.ones(3, dtype=torch.int8), {'a': 1}):
            made, inner = without(state(1), path)
            if path[-1] in ('config', 'versions') and value == {'a': 1} or path[-1] in BOOLEANS:
                continue
            inner[path[-1]] = value
            wrong += [(path, value)] if taken(made, tmp_path / 'x.pt') else []
    assert wrong == []


MISFITS = [
    (('optimizer', 'wte.weight', 'exp_avg'), torch.zeros(64, 8)),
    (('optimizer', 'wte.weight', 'exp_avg_sq'), torch.zeros(16, 64)),
    (('optimizer', 'wte.weight', 'exp_avg'), torch.zeros(64, 16, dtype=torch.float64)),
    (('optimizer', 'wte.weight', 'max_exp_avg_sq'), torch.zeros(64, 16)),
    (('config', 'optimizer'), 'adamw8bit'),
    (('config', 'param_dtype'), 'bf16'),
    (('optimizer', 'h.1.attn.qkv.weight'), {}),
    (('weights', 'wte.weight'), torch.zeros(64, 16).half()),
    (('weights', 'wte.weight'), torch.zeros(128, 16)),
    (('weights', 'extra'), torch.zeros(1)),
    (('model_config', 'n_layer'), 10**9),
    (('model_config', 'n_head'), 3),
    (('model_config', 'mlp'), 'relu'),
    (('model_config', 'experts'), 8),
    (('fp8_state',), {'layers': ['h.0'], 'steps': 1, 'divisor': 1, 'history': torch.zeros(4, 1, 3),
                      'scale': torch.ones(2, 3)}),
    (('fp8_state',), {'layers': ['h.0']}),
    (('fp8_state',), [1]),
]


def test_a_part_that_does_not_fit_is_refused(tmp_path):
    wrong = []
    for path, value in MISFITS:
        made = inner = state(1)
        for key in path[:-1]:
            inner[key] = dict(inner[key])
            inner = inner[key]
        inner[path[-1]] = value
        wrong += [path] if taken(made, tmp_path / 'x.pt') else []
    assert wrong == []


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / 'latest.pt')
    (tmp_path / 'step_000001.pt').mkdir()
    assert find('auto', str(tmp_path)) is None
    for name in ('latest.pt', 'step_000001.pt'):
        with pytest.raises(UserError, match=f'{name} is no file'):
            load(str(tmp_path / name))
    assert table(str(tmp_path)) == [f'no checkpoints in {tmp_path}']


def test_a_file_that_cannot_be_read_is_not_called_damaged(folder, monkeypatch):
    save(folder, state(1), keep=0)
    if os.geteuid() == 0:  # may read everything
        def refused(*arguments):
            raise PermissionError(13, 'Permission denied')
        monkeypatch.setattr(checkpoint, 'open', refused, raising=False)
    else:
        os.chmod(f'{folder}/step_000001.pt', 0)
    with pytest.raises(UserError, match=r'step_000001.pt cannot be read \(Permission denied\)'):
        damage(f'{folder}/step_000001.pt')


# ------------------------------------------------------------------------------------------------------ names

def test_brackets_in_a_path_are_no_pattern(tmp_path):
    mine, other = str(tmp_path / 'run[1]'), str(tmp_path / 'run1')
    for folder in (mine, other):
        start(folder, None, 0, False).close()
        for step in (1, 2, 3):
            save(folder, state(step), keep=2)
    for folder in (mine, other):
        assert [name for name in sorted(os.listdir(folder)) if name.startswith('step')] == names(folder)
        assert names(folder) == ['step_000002.pt', 'step_000003.pt']
    assert all('run[1]' in line for line in table(mine))
    with pytest.raises(UserError, match='an earlier run'):
        start(mine, None, 0, False)


def test_steps_past_a_million_are_newer(folder):
    for step in (999_999, 1_000_000, 1_000_001):
        save(folder, state(step), keep=2)
    assert names(folder) == ['step_1000000.pt', 'step_1000001.pt']
    start(folder, f'{folder}/latest.pt', 1_000_001, False).close()
    with pytest.raises(UserError, match='later checkpoints, step_1000001.pt'):
        start(folder, f'{folder}/step_1000000.pt', 1_000_000, False)


# ------------------------------------------------------------------------------------------ moments in shards

@pytest.fixture
def in_shards():
    """in_shards(folder, step, spoil): the path of a new checkpoint whose moments are in a folder of shards.
    spoil(folder of shards): what is done to that before the checksums are taken."""
    def write(folder, step, spoil=lambda shards: None):
        made = state(step)
        name = f'step_{step:06d}'
        shards = pathlib.Path(folder, name)
        with warnings.catch_warnings():  # that there is one process
            warnings.simplefilter('ignore')
            dcp.save({'optimizer': made['optimizer']}, checkpoint_id=shards, no_dist=True)
        spoil(shards)
        contents = {path.name: path.read_bytes() for path in shards.iterdir()}
        made['optimizer'] = {'folder': name, 'bytes': {key: len(raw) for key, raw in contents.items()},
                             'crc32': {key: zlib.crc32(raw) for key, raw in contents.items()}}
        torch.save(made, f'{folder}/{name}.pt')
        return f'{folder}/{name}.pt'
    return write


def moments_of(path):
    """The moments that a run gets which resumes from a checkpoint."""
    optimizer = optim.make_optimizer(MODEL, (0.9, 0.95), 0.1)
    optim.load_named_state(optimizer, MODEL, load(path, moments=True)['optimizer'])
    return optim.named_state(optimizer, MODEL)


def test_moments_in_shards_are_read_only_where_they_are_wanted(folder, in_shards):
    path = in_shards(folder, 4)
    moments = moments_of(path)
    assert moments.keys() == MODEL.weights().keys()
    assert {kept['step'].item() for kept in moments.values()} == {4.0}
    shutil.rmtree(f'{folder}/step_000004')
    assert load(path)['step'] == 4
    with pytest.raises(UserError, match='step_000004.pt is damaged .*is missing or not as long as it was'):
        load(path, moments=True)


def pickled(value):
    """Writes a value in the place of what torch.distributed.checkpoint notes."""
    return lambda shards: (shards / '.metadata').write_bytes(pickle.dumps(value))


def bytes_for_a_tensor(shards):
    """Has torch.distributed.checkpoint's planner unpickle a shard's bytes in the place of a tensor."""
    noted = pickle.loads((shards / '.metadata').read_bytes())
    raw = saved(Code())
    (shards / '__0_0.distcp').write_bytes(raw)
    for index, info in noted.storage_data.items():
        noted.state_dict_metadata[index.fqn] = metadata.BytesStorageMetadata()
        info.offset, info.length = 0, len(raw)
    noted.storage_data = {metadata.MetadataIndex(index.fqn): info
                          for index, info in noted.storage_data.items()}
    pickled(noted)(shards)


def shards_elsewhere(shards):
    noted = pickle.loads((shards / '.metadata').read_bytes())
    (shards / '__0_0.distcp').rename(shards.parent / 'theirs')
    (shards / '__0_0.distcp').write_bytes(b'')
    for info in noted.storage_data.values():
        info.relative_path = '../theirs'
    pickled(noted)(shards)


def test_code_in_a_folder_of_shards_is_not_run(folder, tmp_path, in_shards, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for spoil in (pickled(Code()), pickled([1]), bytes_for_a_tensor, shards_elsewhere):
        shutil.rmtree(tmp_path / 'step_000004', ignore_errors=True)
        path = in_shards(folder, 4, spoil)
        with pytest.raises(UserError, match='step_000004 holds no shards of this checkpoint') as refusal:
            moments_of(path)
        assert '\n' not in str(refusal.value)
        assert not (tmp_path / 'ran').exists()
        assert load(path)['step'] == 4


def test_code_in_a_folder_of_shards_is_not_run_by_the_scripts(one_run, tmp_path, in_shards):
    """By a resume, which refuses it, or by an evaluation, which reads no moments."""
    state = load(one_run('train.py')[0] / 'latest.pt')
    in_shards(tmp_path, 10, pickled(Code(str(tmp_path / 'ran'))))
    state['optimizer'] = load(tmp_path / 'step_000010.pt')['optimizer']
    torch.save(state, tmp_path / 'step_000010.pt')
    words = ['train_fp8.py', f'--resume={tmp_path}/step_000010.pt', f'--checkpoint_dir={tmp_path}/run']
    assert 'step_000010 holds no shards' in run(*words, rc=1).stderr
    assert 'val loss' in run(*words, '--eval_only').stdout
    assert not (tmp_path / 'ran').exists()


def test_no_folder_but_a_steps_own_is_read(folder, in_shards):
    path = in_shards(folder, 4)
    made, wrong = load(path), []
    for change in (
        {'folder': 'theirs'},
        {'folder': '../elsewhere'},
        {'folder': 4},
        {'bytes': {}, 'crc32': {}},
        {'bytes': {'.metadata': 1, '../x': 1}, 'crc32': {'.metadata': 1, '../x': 1}},
        {'bytes': {'.metadata': '1'}, 'crc32': {'.metadata': 1}},
        {'bytes': {'.metadata': 1}},
        {'bytes': None},
        {'crc32': [1]},
    ):
        torch.save({**made, 'optimizer': made['optimizer'] | change}, f'{folder}/theirs.pt')
        for moments in (False, True):
            with contextlib.suppress(UserError):
                load(f'{folder}/theirs.pt', moments)
                wrong.append((change, moments))
    assert wrong == []


def test_a_damaged_shard_is_found_and_its_step_passed_over(folder, tmp_path, in_shards, capsys):
    for step in (3, 4):
        path = in_shards(folder, step)
    os.link(path, f'{folder}/latest.pt')
    assert find('auto', folder) == f'{folder}/latest.pt'
    shard = tmp_path / 'step_000004' / '__0_0.distcp'
    whole = shard.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for spoilt, problem in ((flipped, f'the checksum of {shard} does not hold'),
                            (whole[:-1], f'{shard} is missing or not as long as it was')):
        shard.write_bytes(spoilt)
        with pytest.raises(UserError) as refusal:
            load(path, moments=True)
        before = f'; the one before it is {folder}/step_000003.pt'
        assert str(refusal.value) == f'{path} is damaged ({problem}){before}'
        assert find('auto', folder) == find('latest', folder) == f'{folder}/step_000003.pt'
        assert find('latest', folder, moments=False) == f'{folder}/latest.pt'
    start(folder, f'{folder}/step_000003.pt', 3, False).close()
    assert 'step_000004.pt.damaged' in capsys.readouterr().out
    assert load(f'{folder}/latest.pt', moments=True)['step'] == 3
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ['step_000003']


def test_folders_of_shards_go_with_their_files_and_a_users_stay(folder, tmp_path, in_shards):
    """The best model's stays, and what holds anything but shards, and a link; what a kill left goes."""
    for step in (1, 2, 3):
        in_shards(folder, step)
    save(folder, {**state(1), 'best_val_loss': 1.5}, keep=0, best=True)
    for name in ('step_000004', 'step_000005.tmp', 'step_000006', 'elsewhere'):
        shutil.copytree(tmp_path / 'step_000001', tmp_path / name)
    for path in ('step_000006/notes', 'step_000007/config.json'):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text('{}')
    (tmp_path / 'step_000008').symlink_to('elsewhere')
    save(folder, state(9), keep=2)
    assert names(folder) == ['step_000003.pt', 'step_000009.pt']
    kept = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    stays = {'elsewhere', 'step_000006', 'step_000007', 'step_000008'}
    assert kept == {'step_000001', 'step_000003', *stays}
    assert len(os.listdir(tmp_path / 'elsewhere')) == 2
