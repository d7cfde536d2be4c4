"""LoRA: adapters against PEFT's own, merged, resumed, and around a base in FP8."""
import dataclasses
import os
import shutil
import types

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import hf
from fp8gpt.tokenizer import get_tokenizer
from fp8gpt import checkpoint, fp8, lora, pretrained
from configurator import SettingError
from conftest import accepted, in_ranks, losses, records, refused, run
from fp8_models import extra_tensors, on_a_cpu, tokens, train
from fp8gpt.fp8 import linear_factory
from helpers import checkpoint_of, compiled, gpt_in, random, relative, same_tensors, spied
from tokenizers_made import CHATML, END, END_OF_TURN, make_tokenizer
from model import GPT, GPTConfig, Linear
from fp8gpt.optim import make_optimizer, set_rate

LLAMA = GPTConfig(vocab_size=64, block_size=64, n_layer=2, n_head=4, n_kv_head=2, n_embd=128, ffn_dim=256,
                  mlp='swiglu', norm='rmsnorm', position='rope', bias=False, tie_embeddings=False)
GPT2 = GPTConfig(vocab_size=64, block_size=64, n_layer=2, n_head=4, n_embd=128)
CONFIGS = pytest.mark.parametrize('config', [LLAMA, GPT2], ids=['llama', 'gpt2'])
ALL = lora.Spec(rank=8, targets='all')
RECIPES = ['tensorwise', 'delayed', 'rowwise', 'rowwise_gw_hp', 'blockwise', 'mxfp8']


def noise(model):
    """Give the adapters' B, which are 0 at first, and whatever else trains, values."""
    for number, p in enumerate(model.weights().values()):
        p.data.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(number))


@CONFIGS
def test_a_new_adapter_changes_nothing_trains_alone_and_merges(config):
    model, idx = GPT(config, dtype=torch.float32), tokens()[0]
    base = model(idx)
    lora.add(model, ALL)
    # PEFT draws A as torch draws a linear: uniform within 1 / sqrt(in)
    drawn = torch.cat([p.flatten() * p.shape[1]**0.5 for name, p in model.weights().items() if '.A.' in name])
    assert drawn.abs().max() <= 1 and drawn.std().item() == pytest.approx(3**-0.5, rel=0.05)
    other = GPT(config, dtype=torch.float32)
    lora.add(other, ALL, seed=1)
    weights = [*model.weights().items(), *other.weights().items()]
    sums = [p.sum().item() for name, p in weights if '.A.' in name]
    assert len({*sums}) == len(sums)      # each by its name, and by the seed
    assert torch.equal(model(idx), base)
    model(*tokens()).backward()
    assert all((p.grad is not None) == ('.lora.' in name) for name, p in model.named_parameters())
    assert all(p.grad.any() for name, p in model.weights().items() if name.endswith('B.weight'))
    noise(model)
    expected = model(idx)
    merged = GPT(config, dtype=torch.float32, seed=None)
    merged.load_weights(lora.merge(model))
    assert relative(merged(idx), expected) < 1e-5 < 0.1 < relative(base, expected)


def test_a_merged_bf16_run_is_a_checkpoint_that_loads(tmp_path):
    """Its weights are fp32, whatever its run's param_dtype was."""
    torch.save(checkpoint_of(GPT(GPT2), 3), tmp_path / 'base.pt')
    model = GPT(GPT2)
    about = {'base': str(tmp_path / 'base.pt'), 'seed': 1, 'checksum': lora.checksum(model),
             **dataclasses.asdict(ALL)}
    lora.add(model, ALL)
    state = checkpoint_of(model, 5, lora=about, config={'param_dtype': 'bf16', 'lora_rank': 8},
                          fp8_state={'steps': 5})
    torch.save(pretrained.with_merged_adapters(state), tmp_path / 'merged.pt')
    merged = checkpoint.read(str(tmp_path / 'merged.pt'))
    assert merged['config']['lora_rank'] == 0 and not merged['lora']
    assert merged['fp8_state'] == merged['optimizer'] == {}     # of adapters and frozen weights


def test_targets_that_the_model_lacks_are_named():
    for config, target, said in ((LLAMA, 'q_porj', 'it has down_proj, gate_proj, k_proj, o_proj, q_p'),
                                 (GPT2, 'q_proj', 'it has c_attn, c_fc, c_proj; all ')):
        with pytest.raises(SettingError, match=f"no '{target}'; {said}"):
            lora.add(GPT(config), lora.Spec(4, targets=target))


@CONFIGS
def test_flops_are_those_that_are_multiplied(config):
    """Counted by torch in a pass of the whole, attention's own, the first block's gradients to nowhere and
    products with the zeros beside the B's aside."""
    counts, told = [], []
    for spec in (lora.Spec(), lora.Spec(rank=4, targets='all')):
        model = GPT(config, dtype=torch.float32)
        if spec.rank:
            lora.add(model, spec)
            model.h[0].ln_1.requires_grad_()  # else nothing before the first adapter has a gradient
        with FlopCounterMode(display=False) as counter:
            model(*tokens()).backward()
        counts.append(counter.get_total_flops() / 128)
        told.append(lora.flops_per_token(config, spec, 64) if spec.rank else config.flops_per_token(64))
    beside = 0
    for _, _, rows in lora.slices(config):
        beside += config.n_layer * 4 * (len(rows) - 1) * sum(rows.values())     # of each token
    assert told[0] - told[1] == pytest.approx(counts[0] - counts[1] + 6 * beside, rel=0.01)
    for targets in 'all', ','.join(spec.chosen(config)[::2]):
        spec, model = lora.Spec(rank=4, targets=targets), GPT(config)
        lora.add(model, spec)
        added = sum(p.numel() for name, p in model.named_parameters() if '.lora.' in name)
        assert spec.parameters(config) == added


MODELS = {
    'Llama': (dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, max_position_embeddings=64), 'q_proj,v_proj,gate_proj,down_proj'),
    'GPT2': (dict(n_positions=64, n_embd=128, n_layer=2, n_head=4), 'c_attn,c_proj'),
}


@pytest.mark.parametrize('rank', [0, 4])
@pytest.mark.parametrize('kind', MODELS)
def test_ten_steps_on_packed_examples_equal_transformers_and_pefts_on_each_alone(kind, rank, tmp_path):
    """PEFT reads the adapters as they are saved here, and goes on with them."""
    transformers, peft = pytest.importorskip('transformers'), pytest.importorskip('peft')
    torch.manual_seed(0)
    fields, names = MODELS[kind]
    config = getattr(transformers, f'{kind}Config')(vocab_size=64, **fields)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()     # without dropout
    theirs.save_pretrained(tmp_path / 'base')
    model = gpt_in(tmp_path / 'base', dtype=torch.float32)
    if rank:
        spec = lora.Spec(rank, alpha=8.0, targets=names)
        lora.add(model, spec)
        noise(model)
        about = {**vars(spec), 'base': 'org/name', 'seed': 1}
        state = {'weights': model.weights(), 'model_config': vars(model.config), 'lora': about,
                 'revisions': {'org/name': 'c' * 40}}
        hf.save_adapters(state, tmp_path / 'ours', get_tokenizer('byte'))
        theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / 'ours', is_trainable=True)
        settings = theirs.peft_config['default']
        assert (settings.base_model_name_or_path, settings.revision) == ('org/name', 'c' * 40)
    optimizers = make_optimizer(model, (0.9, 0.95), 0.0), torch.optim.AdamW(
        [p for p in theirs.parameters() if p.requires_grad], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    set_rate(optimizers[0], 1e-3)
    idx, targets = tokens()                                     # (2, 64)
    targets = targets.where(torch.arange(64) >= 10, -1)         # after a prompt
    examples = (torch.arange(64) >= 40).long().expand(2, 64)    # two in a row
    for _ in range(10):
        logits = torch.cat([theirs(part).logits for part in idx.split([40, 24], 1)], 1)
        wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        found = model(idx, targets, examples=examples)
        assert found.item() == pytest.approx(wanted.item(), rel=2e-6)   # some 17 roundings of fp32
        for loss, optimizer in zip((found, wanted), optimizers):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def choice_of(recipe, backend='emulate'):
    return on_a_cpu(backend, recipe, lora_rank=8)


def test_a_frozen_linear_computes_as_one_that_trains_in_two_products_and_lets_go_of_its_weight():
    """W^T made of W has the bits of W^T cast by itself, though rowwise and mxfp8 share other scales there:
    powers of two change no mantissa, and these weights are none too small for their columns' scales."""
    x = random(128, 128)
    for recipe in RECIPES:
        choice, found = choice_of(recipe), []
        for frozen in (False, True):
            linear = fp8.make_linear(choice, 128, 256)
            mm, operands = spied(linear.arithmetic.mm)
            linear.arithmetic = linear.arithmetic._replace(mm=mm)
            torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(0))
            torch.nn.init.zeros_(linear.bias)
            weight, saved, inputs = linear.weight.detach(), [], x.clone().requires_grad_()
            linear.requires_grad_(not frozen)
            fp8.State(linear, choice)
            with fp8.set_mode(calibrating=True), torch.autograd.graph.saved_tensors_hooks(
                    lambda tensor, saved=saved: saved.append(tensor) or tensor, lambda tensor: tensor):
                y = linear(inputs)
            y.backward(y.detach())
            found.append((y, inputs.grad))
            products = 2 if frozen or recipe == 'rowwise_gw_hp' else 3
            kept_for_backward = [tensor for tensor in saved if tensor.numel() == 128 * 128]
            assert (len(operands), len(kept_for_backward)) == (2 * products, 0 if frozen else 1), recipe
        assert all(torch.equal(a, b) for a, b in zip(*found)), recipe
        assert list(dict(linear.named_parameters())) == ['bias']
        kept = sum(tensor.nbytes for tensor in extra_tensors(linear).values()) / weight.numel()
        assert kept <= (1.125 if recipe == 'mxfp8' else 1.05), recipe   # of 4 bytes, one for 32 values
        with fp8.paused(), torch.no_grad():
            assert torch.equal(linear(x), F.linear(x, weight.to(x.dtype), linear.bias.to(x.dtype))), recipe


def adapted(choice):
    """A GPT with adapters, and its fp8.State."""
    model = GPT(LLAMA, linear_factory(choice, Linear))
    lora.add(model, ALL)
    return model, fp8.State(model, choice)


def steps(choice, network=lambda model: model, micro_steps=1):
    """(model, losses of six steps on one batch)."""
    (model, state), batch = adapted(choice), tokens(65)[0].repeat(micro_steps, 1)
    optimizer = make_optimizer(model, (0.9, 0.95), 0.1)
    return model, train(network(model), state, optimizer, [batch] * 6, micro_steps, rate=1e-2)


def test_the_loss_falls_while_nothing_frozen_moves():
    choice = choice_of('delayed', 'native')
    model, found = steps(choice)
    assert found[-1] < found[0] - 0.05
    frozen, others = ({**dict(each.named_parameters()), **extra_tensors(each)}
                      for each in (model, adapted(choice)[0]))
    names = [name for name in others if '.lora.' not in name and not name.endswith(('amax', 'scale'))]
    assert all(torch.equal(frozen[name].float(), others[name].float()) for name in names)
    assert 'wte.weight' in names and 'h.0.attn.qkv.weight' not in names


def test_a_frozen_weight_is_cast_once(monkeypatch):
    casts, real = [], fp8.cast_weight
    monkeypatch.setattr(fp8, 'cast_weight', lambda *given: casts.append(given) or real(*given))
    _, alone = steps(choice_of('tensorwise'))
    _, parts = steps(choice_of('tensorwise'), micro_steps=2)
    assert len(casts) == 2 * 8
    assert alone == pytest.approx(parts, rel=1e-3)


def test_a_frozen_weight_breaks_no_graph_of_an_evaluation():
    model, _ = adapted(choice_of('tensorwise'))
    idx, _ = tokens()
    with fp8.paused(), torch.no_grad():
        expected = model(idx)
        assert torch.equal(compiled(model, backend='eager', fullgraph=True)(idx), expected)


@pytest.mark.slow
def test_compiled_adapters_train_alike():
    choice = choice_of('delayed')
    _, found = steps(choice, lambda model: compiled(model, backend='aot_eager', fullgraph=True))
    assert found == pytest.approx(steps(choice)[1], rel=1e-3)


@pytest.fixture(scope='module')
def base(one_run):
    return one_run('train.py')[0] / 'latest.pt'


@pytest.fixture(scope='module')
def runs(base, tiny, tmp_path_factory):
    """A folder of checkpoint_dirs, bf16 and fp8: runs with adapters on a base, kept each five steps."""
    folder = tmp_path_factory.mktemp('lora')
    words = [*tiny, '--checkpoint_freq=5', '--keep_checkpoints=0', '--lora_rank=4',
             '--lora_targets=all', f'--init_from={base}']
    run('train.py', *words, f'--checkpoint_dir={folder}/bf16')
    delayed = '--fp8_backend=native', '--fp8_recipe=delayed'
    run('train_fp8.py', *words, *delayed, f'--checkpoint_dir={folder}/fp8')
    return folder


def test_a_resumed_run_equals_an_unbroken_one(runs, tmp_path):
    run('train_fp8.py', f'--resume={runs}/fp8/step_000005.pt', f'--checkpoint_dir={tmp_path}')
    resumed, whole = (checkpoint.read(f'{folder}/latest.pt') for folder in (tmp_path, runs / 'fp8'))
    assert same_tensors(resumed['weights'], whole['weights'])
    assert losses(tmp_path) == losses(runs / 'fp8', after=5)
    assert all('.lora.' in each for each in whole['weights'])
    assert whole['optimizer'].keys() == whole['weights'].keys()
    for word, before in (('lora_rank=0', 'lora_rank=4'), ('lora_targets=c_attn', 'lora_targets=all')):
        resume = f'--resume={runs}/fp8/latest.pt', f'--checkpoint_dir={tmp_path}/run', '--max_steps=12'
        code, said = refused('train_fp8.py', *resume, f'--{word}')
        assert code == 2 and f'{word}, but the checkpoint has {before}' in said, said


def test_a_base_that_is_another_now_is_refused(runs, base, tmp_path, here):
    """By its token embedding or its architecture; and one that is gone. Older files lack the checksum."""
    adapters, other = f'{tmp_path}/adapters.pt', f'{tmp_path}/base.pt'

    def save_adapters(base, **about):
        state = checkpoint.read(f'{runs}/bf16/step_000005.pt')
        state['lora'] |= {'base': base, **about}
        state['config']['init_from'] = base
        torch.save(state, adapters)
    resume = 'train.py', f'--resume={adapters}', f'--checkpoint_dir={tmp_path}/run', '--dry_run'
    sample = 'sample.py', f'--ckpt={adapters}'
    of_base = checkpoint.read(str(base))
    save_adapters(other)
    torch.save(of_base, other)
    assert 'resumed' in here(*resume)
    for part, name, value, message in (
            ('weights', 'wte.weight', torch.zeros(320, 64), 'the adapters were trained on other weights'),
            ('model_config', 'norm_eps', 1e-6, f'{other} has another architecture now')):
        torch.save({**of_base, part: {**of_base[part], name: value}}, other)
        assert accepted((1, message, words) for words in (resume, sample)) == []
    save_adapters(other, checksum=None, fingerprint='12345678')     # as earlier versions wrote it
    torch.save(of_base, other)
    assert 'resumed' in here(*resume)
    for name in ('./gone.pt', 'gone', 'gone/model.pt', f'{tmp_path}/gone'):
        save_adapters(name)
        message = f'the base of the adapters, {name}, is not there: put it back'
        assert accepted((1, message, words) for words in (sample, resume)) == []


def test_a_run_does_not_remove_the_base_of_its_adapters(base, tiny, tmp_path):
    shutil.copytree(base.parent, tmp_path / 'run')
    for name in 'latest.pt', 'step_000005.pt', '':
        words = f'--init_from={tmp_path}/run/{name}', '--lora_rank=4', '--lora_targets=all', '--overwrite'
        code, said = refused('train.py', *tiny, *words, f'--checkpoint_dir={tmp_path}/run/.')
        assert code == 2 and f'overwrite would remove {tmp_path}/run/' in said, said


def test_a_base_is_found_from_any_folder(tmp_path, monkeypatch):
    """A file and a folder by their absolute paths, a preset and a model of the hub by their names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'gpt2').mkdir()         # no base: a preset comes first
    (tmp_path / 'base.pt').touch()
    for name, source, wanted in (
        ('folder', 'a model', f'{tmp_path}/folder'),
        ('./base.pt', 'a model', f'{tmp_path}/base.pt'),
        ('gpt2', None, 'gpt2'),
        ('owner/name', 'a model', 'owner/name'),
    ):
        settings = {'lora_rank': 2, 'lora_alpha': 16.0, 'lora_targets': 'all', 'init_from': name, 'seed': 0}
        a_run = types.SimpleNamespace(resumed=None, config=settings, source=source, of_examples=False)
        assert lora.start(GPT(GPT2), a_run)['base'] == wanted


def test_an_end_that_was_never_trained_is_said(tmp_path, capsys):
    folder = make_tokenizer(tmp_path, chat_template=CHATML)
    settings = {'lora_rank': 2, 'lora_alpha': 16.0, 'lora_targets': 'all', 'init_from': 'gpt2', 'seed': 0}
    a_run = types.SimpleNamespace(resumed=None, source=None, of_examples=True, folder=folder,
                                  tokenizer=get_tokenizer(folder).name)
    for zeros, is_plain, said in ((END_OF_TURN, False, '<|end_of_turn|> ends an answer'), (END, False, ''),
                                  (END_OF_TURN, True, ''), (END, True, '<|end|> ends an answer')):
        model = GPT(dataclasses.replace(GPT2, vocab_size=600))
        a_run.config = settings | {'is_plain': is_plain}
        model.wte.weight.data[zeros] = 1e-24
        lora.start(model, a_run)
        out = capsys.readouterr().out
        assert said in out and bool(out) == bool(said)
        with torch.no_grad():       # as resize_token_embeddings makes the rows of two added tokens
            model = GPT(dataclasses.replace(GPT2, vocab_size=600))
            model.wte.weight[[zeros, 599]] = model.wte.weight[:zeros].mean(0) + model.wte.weight[7]
        lora.start(model, a_run)
        assert said in (out := capsys.readouterr().out) and bool(out) == bool(said)
        with torch.no_grad():       # of one added token, where all rows share a direction
            model = GPT(dataclasses.replace(GPT2, vocab_size=600))
            model.wte.weight += 0.1
            model.wte.weight[zeros] = model.wte.weight.mean(0)
        lora.start(model, a_run)
        assert said in (out := capsys.readouterr().out) and bool(out) == bool(said)


def test_a_merged_checkpoint_is_one_as_any(runs, base, tmp_path, monkeypatch):
    merged, ckpt = f'{tmp_path}/merged', f'{runs}/bf16/latest.pt'
    out = run('hf.py', 'merge', f'--ckpt={ckpt}', f'--out={merged}').stdout
    assert out == f'merged {ckpt}, step 10: {merged}\n'
    words = '--max_new_tokens=30', '--prompt=def '
    texts = [run('sample.py', f'--ckpt={path}', *words).stdout.partition('\n')[2]
             for path in (merged, ckpt, base)]
    assert texts[0] == texts[1] != texts[2]
    code, message = refused('train.py', f'--resume={merged}', f'--checkpoint_dir={tmp_path}/run')
    assert code == 2 and f'--init_from={merged}/latest.pt starts a new run with its weights' in message
    monkeypatch.setattr('torch.save', lambda *_: torch.ones(2).view(3))     # RuntimeError, as of a full disk
    code, message = refused('hf.py', 'merge', f'--ckpt={ckpt}', f'--out={tmp_path}/again')
    assert (code, 'again.' in message, 'is the disk full?' in message) == (1, True, True), message
    assert not [*tmp_path.glob('again*')]


def test_a_run_starts_from_adapters_and_their_base(runs, tiny, tmp_path):
    words = 'train.py', *tiny, f'--init_from={runs}/bf16/latest.pt', f'--checkpoint_dir={tmp_path}'
    run(*words, '--max_steps=2', '--eval_freq=1')
    merged, base = (dict(records(folder, 'val/loss')) for folder in (tmp_path, runs / 'bf16'))
    assert merged[0] == pytest.approx(base[10], rel=1e-3)


def test_a_validation_loss_in_fp8_is_the_merged_models(runs, tiny, tmp_path):
    """At step 0 it is bf16's to the bit, by --eval_only the run's own, and merged the same but for bf16."""
    of_fp8, of_bf16 = (dict(records(runs / name, 'val/loss')) for name in ('fp8', 'bf16'))
    assert of_fp8[0] == of_bf16[0] and of_fp8[10] != of_bf16[10]
    again = run('train_fp8.py', f'--resume={runs}/fp8/latest.pt', '--eval_only').stdout
    assert f'val loss {of_fp8[10]:.4f}' in again
    words = 'train.py', *tiny, f'--init_from={runs}/fp8/latest.pt', f'--checkpoint_dir={tmp_path}'
    run(*words, '--max_steps=2')
    assert dict(records(tmp_path, 'val/loss'))[0] == pytest.approx(of_fp8[10], rel=1e-3)


def test_adapters_on_adapters_take_a_merge(runs, tiny, tmp_path, here):
    """Those that an earlier version trained, too, once the merged file is in the place of their base."""
    first, second = tmp_path / 'first.pt', tmp_path / 'second.pt'
    shutil.copy(runs / 'bf16' / 'latest.pt', first)
    state = checkpoint.read(str(first))
    whole = pretrained.with_merged_adapters(state)
    state['lora'] |= {'base': str(first), 'checksum': lora.checksum(pretrained.model_of(whole))}
    torch.save(state, second)
    new = 'train.py', *tiny, f'--init_from={first}', '--lora_rank=2', f'--checkpoint_dir={tmp_path}/run'
    message = f'first `python hf.py merge --ckpt={first} --out=merged`'
    assert accepted((2, message, words) for words in (new, ('sample.py', f'--ckpt={second}'))) == []
    here('hf.py', 'merge', f'--ckpt={first}', f'--out={tmp_path}/merged')
    os.replace(tmp_path / 'merged' / 'latest.pt', first)
    assert 'def ' in here('sample.py', f'--ckpt={second}', '--prompt=def ', '--max_new_tokens=9')


def test_ranks_train_the_same_adapters(base, tiny, tmp_path):
    words = [*tiny, '--lora_rank=4', '--lora_targets=all', f'--init_from={base}', '--fp8_backend=native',
             '--total_batch_size=512', '--max_steps=4']
    in_ranks(2, 'train_fp8.py', *words, f'--checkpoint_dir={tmp_path}/two')
    run('train_fp8.py', *words, f'--checkpoint_dir={tmp_path}/one')
    one, two = (losses(tmp_path / name) for name in ('one', 'two'))
    assert two == pytest.approx(one, rel=1e-3)
