"""Turn a GGUF file into the folder that the engine reads: bf16 safetensors, tokenizer, chat template, configuration.

Run as a process of its own (`python -m deployments.gguf_import FILE FOLDER`): it loads torch and the whole model, and
whoever asked for it should not keep either.
"""

from __future__ import annotations

import sys
from pathlib import Path


def import_gguf(file: Path, folder: Path) -> None:
    """Write the model in `file` to the existing `folder`. Needs memory for all of it in bf16 and its largest tensor."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent),
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    if tokenizer_family(file) == "smollm":
        # The generic conversion leaves out this family's first step, digits one by one. Without it the white space
        # before a digit is cut otherwise than in training ("\n\n1." becomes two tokens of "\n" instead of one "\n\n").
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def tokenizer_family(file: Path) -> str:
    """What the file's metadata calls the rule that splits text before the merges."""
    from gguf import GGUFReader

    field = GGUFReader(file).get_field("tokenizer.ggml.pre")
    return str(field.contents()) if field is not None else ""


if __name__ == "__main__":
    import_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
