"""tokenizer.json folders that the tests make, as models' makers lay them out."""
import json

from tokenizers import (
    AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers)

from conftest import ROOT

SPECIAL = ['<|begin|>', '<|end|>', '<|turn|>', '<|end_of_turn|>']
BEGIN, END, TURN, END_OF_TURN = range(4)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\\n' + message['content'] + '<|end_of_turn|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}")


def make_tokenizer(folder, adds_begin=True, adds_end=False, generation=None, words=(), prepends=False,
                   **config):
    """A folder with a byte-level tokenizer.json of some 600 tokens, trained on the LICENSE, and `words` added
    to it. adds_begin, adds_end: its post-processor puts <|begin|> before a text, <|end|> behind it.
    generation: generation_config.json. prepends: as Llama 2's, it writes spaces as U+2581, puts one before a
    text, and has no bytes in pairs. config: more of tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if prepends:
        tokenizer = Tokenizer(models.BPE(unk_token='<0x00>', byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')])
        tokenizer.decoder = decoders.Sequence([
            decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(' ', 1, 0)])
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, show_progress=False,
        special_tokens=[*SPECIAL, *(f'<0x{i:02X}>' for i in range(256 * prepends))])
    tokenizer.train_from_iterator([(ROOT / 'LICENSE').read_text()], trainer)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    if adds_begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single='<|begin|> $A' + ' <|end|>' * adds_end, pair='<|begin|> $A $B',
            special_tokens=[('<|begin|>', BEGIN), ('<|end|>', END)])
    tokenizer.save(str(folder / 'tokenizer.json'))
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': '<|begin|>',
              'eos_token': {'content': '<|end|>', '__type': 'AddedToken'}, **config}
    (folder / 'tokenizer_config.json').write_text(json.dumps(config))
    if generation:
        (folder / 'generation_config.json').write_text(json.dumps(generation))
    return str(folder)
