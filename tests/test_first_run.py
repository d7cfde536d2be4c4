"""The command that prepare_data.py ends with: a config that fits the dataset and the machine."""
import shlex
import types

from configurator import configure
from conftest import ROOT
from planning import first_run

GPUS = {
    'cpu': [],
    'one': [{'capability': (9, 0)}],
    'eight': [{'capability': (9, 0)}] * 8,
    'old': [{'capability': (8, 0)}],
}
LLAMA = 'meta-llama/Llama-3.2-1B'
# machine, dataset, tokenizer: what starts with which words
NEXT = {
    ('cpu', 'stdlib', 'byte'): 'python train_fp8.py config/quickstart.py',
    ('cpu', 'shakespeare', 'byte'): 'python train_fp8.py config/shakespeare_cpu.py',
    ('one', 'shakespeare', 'byte'): 'python train_fp8.py config/shakespeare_fp8.py',
    ('old', 'shakespeare', 'byte'): 'python train.py config/shakespeare_fp8.py',
    ('cpu', 'fineweb_edu', 'gpt2'): 'python train_fp8.py config/fineweb_cpu.py',
    ('one', 'fineweb_edu', 'gpt2'): 'python train_fp8.py config/gpt2_fp8.py',
    ('eight', 'fineweb_edu', 'gpt2'):
        'torchrun --standalone --nproc_per_node=8 train_fp8.py config/gpt2_fp8.py',
    ('one', 'openwebtext', 'gpt2'): 'python train_fp8.py config/h100_350m_fp8.py',
    ('cpu', 'mine', 'byte'): 'python train_fp8.py config/quickstart.py --dataset=mine',
    ('cpu', 'mine', 'gpt2'): 'python train_fp8.py config/fineweb_cpu.py --dataset=mine',
    ('cpu', 'mine', '/t'): 'python train_fp8.py --dataset=mine --tokenizer=/t',
    ('one', 'openmathinstruct2', LLAMA): 'python train_fp8.py config/finetune_llama32_1b.py',
    ('cpu', 'chats', 'byte'): 'python train_fp8.py config/quickstart.py --dataset=chats --init_from=scratch',
    ('one', 'chats', '/t'):
        'python train_fp8.py config/finetune.py --init_from=/t --dataset=chats --tokenizer=/t',
}


def test_the_config_fits_the_dataset_and_the_machine(monkeypatch):
    monkeypatch.chdir(ROOT)
    wrong = []
    for (machine, name, tokenizer), wanted in NEXT.items():
        monkeypatch.setattr(first_run, 'nvidia_smi', lambda: GPUS[machine])
        asked = types.SimpleNamespace(name=name, tokenizer=tokenizer, split_name='', data_dir='data')
        line = first_run.command(asked, examples=name in ('openmathinstruct2', 'chats'))
        config = configure('train_fp8.py', shlex.split(line.partition('.py ')[2]))
        if (config['dataset'], config['tokenizer']) != (name, tokenizer):
            wrong.append(f'{line} resolves to other data')
        if line != f'{wanted} --checkpoint_dir=checkpoints_{name}':
            wrong.append(line)
    assert wrong == []
    asked = types.SimpleNamespace(name='mine', tokenizer='byte', split_name='train_2M', data_dir='a b')
    assert " --split_name=train_2M '--data_dir=a b' " in first_run.command(asked)
