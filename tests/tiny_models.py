"""Small models with random weights, real transformers code all the same, and a word tokenizer with a chat template."""

from __future__ import annotations

from pathlib import Path

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 96,
}  # fmt: skip
WORDS = [f"w{number}" for number in range(60)]
TEMPLATE = (
    "{% for message in messages %}{{ 'w1 ' + message['content'] + ' w2 ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w3' }}{% endif %}"
)


def make_network(kind: str = "Llama", seed: int = 0, **settings):
    import torch
    import transformers

    config = getattr(transformers, f"{kind}Config")(**(SIZES | {"eos_token_id": 2, "pad_token_id": 0} | settings))
    torch.manual_seed(seed)
    network = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in network.named_parameters():
        # Initial weights are so small that attention is flat; larger ones make every part of the model matter.
        if parameter.ndim > 1:
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed + len(name)))
    return network


def save_tokenizer(folder: Path, chat: bool = True) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"<s>": 0, "<unk>": 1, "</s>": 2} | {word: 3 + index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>", eos_token="</s>")
    if chat:
        wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)


def save_model(folder: Path, kind: str = "Llama", tokenizer: bool = True, shard: str = "1GB", **settings) -> Path:
    make_network(kind, **settings).save_pretrained(folder, max_shard_size=shard)
    if tokenizer:
        save_tokenizer(folder)
    return folder
