"""Prompt text of a document, rendered by flashd itself or by the official encoder."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def add_arguments(parser):
    """The options that choose a renderer."""
    parser.add_argument("--flashd", default="", help="the flashd binary (default: target/release/flashd, then PATH)")
    parser.add_argument("--encoding-dir", default="", help="folder of the official encoding_dsv4.py, used instead")


class Renderer:
    """Turns documents into text. flashd starts a process a document (hundreds a second and core); a training run,
    which needs thousands, is better fed by the official encoder in this process. Both give the same bytes."""

    def __init__(self, flashd="", encoding_dir=""):
        self.encode_messages = None
        if encoding_dir:
            sys.path.insert(0, encoding_dir)
            from encoding_dsv4 import encode_messages

            self.encode_messages = encode_messages
            return
        built = Path(__file__).parents[2] / "target/release/flashd"
        self.flashd = flashd or (str(built) if built.exists() else shutil.which("flashd"))
        if not self.flashd:
            sys.exit("no flashd binary: build it with `cargo build --release`, or name one with --flashd")

    def __call__(self, doc, rng=None):
        """(prompt, answer), or (whole text, None) for a chat document.

        With `rng`, 4 % of the thinking documents ask for effort max.
        """
        if "raw" in doc:
            prompt, answer = doc["raw"]
            return (BOS if doc["bos"] else "") + prompt, answer + EOS
        at_most = rng is not None and doc["mode"] == "thinking" and rng.random() < 0.04
        effort = "max" if at_most else None
        messages = [dict(message) for message in doc["messages"]]
        if self.encode_messages:
            return self.encode_messages(messages, doc["mode"], reasoning_effort=effort), None
        return self._by_flashd(dict(messages=messages, mode=doc["mode"], drop_thinking=True, effort=effort)), None

    def _by_flashd(self, request):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(request, file, ensure_ascii=False)
            file.flush()
            command = [self.flashd, "debug", "render", "--input", file.name]
            text = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode()
        # Training text ends with the last answer; a server would go on to open the next turn.
        return text[: text.rindex(EOS) + len(EOS)]
