"""The steps of gpu-proof.sh: op tables, fixtures against the CPU, bits, the demo model's texts, a load, the real shape. Standard library only."""

import argparse
import array
import json
import os
import pathlib
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = {"small": 11, "odd": 23}
# Limits of a device against the CPU's `device` mode: the largest difference of a position's logits.
MEDIAN, WITHIN, SHARE = 2e-2, 0.3, 0.99
SAME_TEXTS = 0.95
N_FORCED = 160


def run(*command, check=True):
    """A command's output; its error text where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def tensors(path):
    """A safetensors file as {name: array}; F32 and 32-bit integers only."""
    data = pathlib.Path(path).read_bytes()
    n_header = struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, spec in json.loads(data[8 : 8 + n_header]).items():
        if name != "__metadata__":
            start, end = (8 + n_header + offset for offset in spec["data_offsets"])
            found[name] = array.array("f" if spec["dtype"] == "F32" else "i", data[start:end])
    return found


class Proof:
    """Runs the steps and keeps the table."""

    def __init__(self, flashd, device):
        self.flashd, self.device, self.rows = pathlib.Path(flashd).resolve(), device, []
        # The CPU's mode that adds in the device's order.
        self.mode = "device64" if device == "hip" else "device"
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="flashd-proof-"))

    def step(self, name, work):
        start = time.monotonic()
        try:
            is_ok, text = work()
        except Exception as error:  # A step that breaks is a failed line of the table; the others still run.
            is_ok, text = False, str(error)
        self.rows.append((name, is_ok, text, time.monotonic() - start))
        print(f"{'ok    ' if is_ok else 'FAILED'} {name}: {text} ({self.rows[-1][3]:.1f} s)", flush=True)

    def ops(self):
        output = run(self.flashd, "selftest", "ops", "--device", self.device, "--quiet", check=False)
        counts = re.findall(r"(\d+) passed, (\d+) failed", output)
        is_ok = bool(counts) and all(failed == "0" for _, failed in counts)
        return is_ok, ", ".join(f"{p} passed, {f} failed" for p, f in counts) or output[-600:]

    def logits(self, model, tokens, chunk, *place):
        return self.tensors(model, tokens, chunk, *place)["logits"]

    def tensors(self, model, tokens, chunk, *place):
        out, file = self.folder / "logits.safetensors", self.folder / "tokens.json"
        file.write_text(json.dumps(tokens))
        run(self.flashd, "debug", "logits", "--model", model, "--tokens", file, "--out", out, "--chunk", chunk, *place)
        return tensors(out)

    def first_difference(self, model, tokens):
        """Where the layers of device and CPU part, for the tokens given: the first value of the pass that differs."""
        traces = [
            self.tensors(model, tokens, 64, "--trace", *place)
            for place in (["--device", self.device], ["--mode", self.mode])
        ]
        n_layers = 1 + max(int(name.split(".")[1]) for name in traces[0] if "." in name)
        n_rows = len(tokens["prompt"]) + len(tokens["then"])
        for name in (f"{part}.{layer}" for layer in range(n_layers) for part in ("attention", "experts", "residual")):
            on_device, on_cpu = (trace[name] for trace in traces)
            width = len(on_cpu) // n_rows
            for i, (a, b) in enumerate(zip(on_device, on_cpu)):
                if a != b:
                    return f"{name}, row {i // width}, element {i % width}: {a!r} instead of {b!r}"
        return "only in the head"

    def fixture(self, name):
        """Forced tokens on the device against the CPU, then the same bits over chunks and over prefill against decode."""
        fixture = ROOT / "tests/fixtures" / name
        golden, model = tensors(fixture / "golden.safetensors"), self.folder / name
        if not model.exists():
            run(self.flashd, "synth", "--config", fixture / "config.json", "--seed", FIXTURES[name], "--out", model)
        ids = list(golden["tokens"])
        first = golden["decode_range"][0]
        tokens = {"prompt": ids[:first], "then": ids[first : first + N_FORCED]}
        on_device = self.logits(model, tokens, 64, "--device", self.device)
        on_cpu = self.logits(model, tokens, 512, "--mode", self.mode)
        n_rows = 1 + len(tokens["then"])
        width = len(on_device) // n_rows
        errors = [
            max(abs(a - b) for a, b in zip(on_device[r * width : (r + 1) * width], on_cpu[r * width : (r + 1) * width]))
            for r in range(n_rows)
        ]
        if any(error != error for error in errors):
            return False, "NaN"
        median, share = statistics.median(errors), sum(e <= WITHIN for e in errors) / n_rows
        last = on_device[(n_rows - 1) * width :]
        n_all = first + len(tokens["then"])
        same = [
            self.logits(model, {"prompt": ids[:n_all], "then": []}, chunk, "--device", self.device) == last
            for chunk in (1, 7, 64, 512)
        ]
        n_equal = sum(error == 0 for error in errors)
        text = f"median {median:.2e}, {share:.1%} within {WITHIN}, worst {max(errors):.2e}, {n_equal} of {n_rows} positions equal"
        text += f"; same bits in chunks of 1, 7, 64, 512: {same}"
        if n_equal < n_rows:
            n_then = next(i for i, error in enumerate(errors) if error > 0)
            where = self.first_difference(model, {"prompt": ids[:first], "then": ids[first : first + n_then]})
            text += f"; first difference: {where}"
        return median <= MEDIAN and share >= SHARE and all(same), text

    def serve(self, *flags):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = open(self.folder / f"serve-{port}.log", "w")
        command = [str(self.flashd), "serve", "--model", str(ROOT / "demo-model"), "--port", str(port), *flags]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                return server, f"http://127.0.0.1:{port}"
            except OSError:
                if server.poll() is not None:
                    break
                time.sleep(0.1)
        server.kill()
        raise RuntimeError(f"the server did not start: {pathlib.Path(log.name).read_text()[-1500:]}")

    @staticmethod
    def stop(server):
        server.send_signal(signal.SIGTERM)
        return server.wait(timeout=60)

    @staticmethod
    def complete(url, prompt):
        body = {"model": "deepseek-v4-flash", "prompt": prompt, "temperature": 0, "max_tokens": 48}
        request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=300))["choices"][0]["text"]

    def demo(self):
        """Greedy texts of the golden prompts, device against the golden ones."""
        golden = json.loads((ROOT / "tests/demo/golden.json").read_text())["prompts"]
        server, url = self.serve("--device", self.device)
        try:
            texts = [self.complete(url, prompt["prompt_ids"]) for prompt in golden]
        finally:
            code = self.stop(server)
        wrong = [p["name"] for p, text in zip(golden, texts) if text != p["exact"]["text"]]
        n_same = len(golden) - len(wrong)
        text = f"{n_same} of {len(golden)} texts equal the golden ones; exit code {code}" + (f"; others: {wrong}" if wrong else "")
        return n_same >= SAME_TEXTS * len(golden) and code == 0, text

    def load(self):
        server, url = self.serve("--device", self.device)
        try:
            table = run(self.flashd, "bench", "--base-url", url, "--concurrency", "1,8,32", "--output-tokens", "64")
        finally:
            code = self.stop(server)
        print(table)
        errors = [line for line in table.splitlines() if re.match(r"│\s+\d", line) and line.split("│")[1].split()[4] != "0"]
        return code == 0 and not errors, "demo model (trained, tiny); the table is above"


    def real_shape(self, experts):
        """The official shape with synthetic weights; the simulator runs a small one."""
        small = ["--streams", "1,2", "--contexts", "6,40", "--prefills", "5", "--steps", "2"]
        is_sim = self.device == "sim"
        shape = [ROOT / "tests/fixtures/odd/config.json", *small] if is_sim else ["real", "--experts", experts]
        print(run(self.flashd, "bench", "--device", self.device, "--synthetic", *shape))
        return True, "synthetic weights; the tables are above"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("flashd")
    parser.add_argument("device", nargs="?", default="cuda", choices=["cuda", "hip", "sim"])
    parser.add_argument("--no-bench", action="store_true", help="leave out the bench of the official shape")
    parser.add_argument("--experts", type=int, default=192, help="routed experts a layer of that bench")
    args = parser.parse_args()
    flashd, device = args.flashd, args.device
    proof = Proof(flashd, device)
    os.chdir(ROOT)
    print(run(flashd, "--version").strip(), "on", device)
    proof.step("op tables", proof.ops)
    for name in FIXTURES:
        proof.step(f"fixture {name}", lambda name=name: proof.fixture(name))
    proof.step("demo texts", proof.demo)
    proof.step("load", proof.load)
    if not args.no_bench:
        proof.step("real shape", lambda: proof.real_shape(args.experts))
    print(f"\n{'step':<16} {'':<7} {'seconds':>8}  result")
    for name, is_ok, text, seconds in proof.rows:
        print(f"{name:<16} {'ok' if is_ok else 'FAILED':<7} {seconds:>8.1f}  {text}")
    sys.exit(not all(row[1] for row in proof.rows))


main()
