"""Train the byte-level BPE tokenizer (3,072 entries) on generated text."""

import argparse
import json
import random
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import rendering
from generator import MAKE, words

# The first four are special in the tokenizer's sense (skipped when decoding); the others are plain added tokens.
HARD = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜dspark_noise｜>"]
SPECIAL = HARD + [
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜extracted_url｜>",
]
# The three splits of the real model's tokenizer, so that the demo exercises the same pre-tokenizer.
DIGITS = r"\p{N}{1,3}"
CJK = "[一-龥぀-ゟ゠-ヿ]+"
WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"""|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


def corpus(render, n_docs=30000):
    """Generated text without digits, so that numbers stay one token a digit."""
    rng = random.Random(7)
    for i in range(n_docs):
        task = rng.choices(list(MAKE), [2, 2, 5, 2, 3, 1])[0]
        prompt, answer = render(MAKE[task](rng))
        text = prompt + (answer or "")
        for token in SPECIAL:
            text = text.replace(token, "\n")
        if task == "tools" and i % 8:
            text = text.split("Schemas")[-1]
        yield re.sub(r"\d", "", text)
    for word in words.WORDS + words.SECRET + words.FIRST + words.LAST:
        yield (" " + word + " ") * 6


def train(render):
    tok = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (DIGITS, CJK, WORDS)]
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        splits + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3072,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=24,
    )
    tok.train_from_iterator(corpus(render), trainer)
    tok.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in HARD])
    return tok


def save(tok, folder):
    path = folder / "tokenizer.json"
    tok.save(str(path))
    content = json.loads(path.read_text())
    for entry in content["added_tokens"]:
        entry["special"] = entry["content"] in HARD
        entry["normalized"] = False
    path.write_text(json.dumps(content, ensure_ascii=False, indent=0))
    config = dict(
        add_bos_token=False,
        add_eos_token=False,
        bos_token=HARD[0],
        eos_token=HARD[1],
        pad_token=HARD[2],
        clean_up_tokenization_spaces=False,
        model_max_length=65536,
        tokenizer_class="PreTrainedTokenizerFast",
        unk_token=None,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for tokenizer.json and tokenizer_config.json")
    rendering.add_arguments(parser)
    args = parser.parse_args()
    tok = train(rendering.Renderer(args.flashd, args.encoding_dir))
    save(tok, args.out)
    print("entries", tok.get_vocab_size())


if __name__ == "__main__":
    main()
