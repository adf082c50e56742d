"""Reads the config of each model of a list of cells as the installed vLLM does, and prints what it makes of it, or the
error.

python -m benchmarks.families.read_configs benchmarks/families/cells.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fp8plan.model.configs import find_config


def main() -> None:
    from vllm.config import ModelConfig

    print(json.dumps({name: version(name) for name in ("torch", "transformers")}))
    cells = Path(sys.argv[1])
    for setting in json.loads(cells.read_text()):
        source = cells.parent / setting["config"] if "config" in setting else setting["model"]
        print(json.dumps({"model": setting["model"]} | read(find_config(source)[0], ModelConfig)), flush=True)


def read(fields: dict[str, Any], model_config: type) -> dict[str, object]:
    """Facts that vLLM takes from a config, without the fields that start with an underscore."""
    config = {name: value for name, value in fields.items() if not name.startswith("_")}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        try:
            found = model_config(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=8192)
        except Exception as error:  # whatever it is, it is the answer
            return {"error": f"{type(error).__name__}: {error}"[:1500]}
        return {
            "class": type(found.hf_config).__name__,
            "architectures": found.architectures,
            "is_hybrid": found.is_hybrid,
            "is_moe": found.is_moe,
            "use_mla": found.use_mla,
            "head_size": found.get_head_size(),
            "layers": found.get_total_num_hidden_layers() if hasattr(found, "get_total_num_hidden_layers") else None,
        }


if __name__ == "__main__":
    main()
