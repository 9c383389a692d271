"""The tokenizer of the built-in model: one token per character; saved with it, `AutoTokenizer` and vLLM find it."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD = "<pad>"
EOS = "<eos>"


def build_char_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer that maps each of some different characters to one token and adds nothing.

    Token ids: padding 0, end of sequence 1, then the characters in the order given. A character outside the
    vocabulary is an error when encoding, never a silent gap.
    """
    if not characters or len(set(characters)) != len(characters):
        raise ValueError(f"characters must be different ones, at least one, got {characters!r}")
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )
