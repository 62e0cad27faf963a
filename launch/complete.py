"""Let stock transformers load a folder and complete a prompt: FOLDER PROMPT [EXPECTED].

Exits 1 when EXPECTED is given and the completion does not hold it.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, prompt: str, expected: str = "") -> int:
    """Greedy, 12 new tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(tokens[0], skip_special_tokens=True)
    sys.stdout.write(f"{folder} completes: {text!r}\n")
    return 0 if expected in text else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
