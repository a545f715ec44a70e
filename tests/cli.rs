//! The built binary: help, exit codes, doctor, complete and chat with the demo model, serve from start to drain.

// Panicking is how a test fails, in its helpers too.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PROMPT: &str = "Calculate 17 * 23. Answer with the number only.";

/// Nothing here takes long; a test that hangs must end.
const LIMIT: Duration = Duration::from_secs(60);

/// The binary without the caller's keys, log filter and history.
fn flashd() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashd"));
    for name in ["FLASHD_API_KEY", "VLLM_API_KEY", "FLASHD_LOG", "XDG_STATE_HOME", "HOME"] {
        command.env_remove(name);
    }
    command
}

fn run(args: &[&str]) -> Output {
    flashd().args(args).stdin(Stdio::null()).output().expect("the binary runs")
}

fn run_with_input(args: &[&str], input: &str) -> Output {
    let mut child =
        flashd().args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("runs");
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("the program reads its input");
    child.wait_with_output().expect("ends")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn help_and_version_go_to_stdout() {
    for args in [&["--help"][..], &["help"], &["serve", "--help"], &["complete", "-h"], &["--version"], &["-V"]] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{args:?}");
    }
    assert_eq!(stdout(&run(&["--version"])).trim(), concat!("flashd ", env!("CARGO_PKG_VERSION")));
    let help = stdout(&run(&["serve", "--help"]));
    for flag in ["--served-model-name", "--max-model-len", "--max-num-seqs", "--kv-cache-memory-bytes", "--config"] {
        assert!(help.contains(flag), "{flag}");
    }
}

#[test]
fn what_cannot_be_used_ends_with_2_and_names_it() {
    let cases: [(&[&str], &str); 9] = [
        (&[], "Usage"),
        (&["no-such-command"], "no-such-command"),
        (&["serve", "--no-such-flag"], "--no-such-flag"),
        (&["serve", "--port", "70000"], "70000"),
        (&["serve", "--max-num-seqs", "0"], "--max-num-seqs"),
        (&["serve", "--device", "metal"], "--device metal"),
        (&["serve", "--tensor-parallel-size", "2"], "--tensor-parallel-size 2"),
        (&["serve", "--model", "/no/such/model"], "/no/such/model"),
        (&["complete", "--temperature", "9", "hello"], "temperature"),
    ];
    for (args, word) in cases {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(word), "{args:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}

#[test]
fn a_settings_file_is_checked_to_the_line() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "port: 8000\nmax-model-length: 4096\n").unwrap();
    let output = run(&["serve", "--config", file.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    assert!(text.contains("max-model-length") && text.contains("line 2"), "{text}");
}

/// A copy of the demo model to damage.
fn demo_copy() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo-model");
    for entry in std::fs::read_dir(demo).unwrap().flatten().filter(|entry| entry.path().is_file()) {
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

#[test]
fn a_damaged_checkpoint_ends_with_4() {
    let dir = demo_copy();
    let shard = dir.path().join("model-00002-of-00002.safetensors");
    let length = std::fs::metadata(&shard).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&shard).unwrap().set_len(length - 1000).unwrap();
    let output = run(&["complete", "--model", dir.path().to_str().unwrap(), "hello"]);
    assert_eq!(output.status.code(), Some(4), "{}", stderr(&output));
    let text = stderr(&output);
    assert!(text.contains("model-00002-of-00002.safetensors") && text.contains("1000 bytes"), "{text}");
}

#[test]
fn a_checkpoint_that_does_not_fit_its_config_ends_the_server_with_4() {
    let dir = demo_copy();
    let config = dir.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("\"hidden_size\": 256", "\"hidden_size\": 512")).unwrap();
    let server = Server::start(&["--model", dir.path().to_str().unwrap()]);
    let (code, lines) = server.end();
    assert_eq!(code, Some(4), "{lines:#?}");
    assert!(lines.iter().any(|line| line.contains("want") && line.contains("512")), "{lines:#?}");
}

#[test]
fn debug_renders_a_prompt_and_nothing_else() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), r#"{"messages":[{"role":"user","content":"hi"}],"mode":"chat"}"#).unwrap();
    let output = run(&["debug", "render", "--input", file.path().to_str().unwrap()]);
    assert_eq!(stdout(&output), "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>");
}

#[test]
fn doctor_finds_the_demo_model() {
    let output = run(&["doctor"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    for word in ["cpu", "memory", "hip", "cuda", "739 tensors", "3072 ids", "can run here"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(text.contains("values were not read"), "{text}");
    let output = run(&["doctor", "--full"]);
    assert!(output.status.success() && stdout(&output).contains("no NaN codes"), "{}", stdout(&output));
    let output = run(&["doctor", "--model", "/no/such/model"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("FAULT"), "{}", stdout(&output));
}

#[test]
fn complete_answers_in_chat_raw_and_from_standard_input() {
    let greedy = ["complete", "--temperature", "0", "--max-tokens", "32"];
    let with = |more: &[&'static str]| [&greedy[..], more].concat();
    for args in [with(&[PROMPT]), with(&["--raw", PROMPT])] {
        let output = run(&args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
        assert_eq!(stdout(&output).trim(), "391", "{args:?}");
    }
    let output = run_with_input(&with(&["--stats"]), &format!("{PROMPT}\n"));
    assert_eq!(stdout(&output).trim(), "391");
    assert!(stderr(&output).contains("tok/s"), "{}", stderr(&output));
}

#[test]
fn chat_goes_on_through_a_pipe() {
    let lines = format!("/help\n{PROMPT}\n/stats\n{PROMPT}\n/nonsense\n/new\n/quit\nnever said\n");
    let output = run_with_input(&["chat", "--temperature", "0", "--max-tokens", "32", "--no-history"], &lines);
    let (out, err) = (stdout(&output), stderr(&output));
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(out.matches("391").count() >= 1, "{out}\n{err}");
    assert!(err.contains("/read FILE") && err.contains("no such command"), "{err}");
    assert!(err.contains("cached"), "{err}");
}

#[test]
fn chat_refuses_a_line_or_a_file_that_is_no_text_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = mkfifo(dir.path(), "fifo");
    let mut input = b"\xFF\xFE\n".to_vec();
    input.extend(format!("/read {}\n/read /dev/zero why?\n{PROMPT}\n", fifo.display()).bytes());
    let mut child = flashd()
        .args(["chat", "--temperature", "0", "--max-tokens", "32"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&input).unwrap();
    let output = child.wait_with_output().unwrap();
    let (out, err) = (stdout(&output), stderr(&output));
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(out.contains("391"), "{out}\n{err}");
    assert!(err.contains("not UTF-8") && err.matches("not a regular file").count() == 2, "{err}");
}

/// All lines reach the terminal before the first prompt does.
#[cfg(target_os = "linux")]
#[test]
fn chat_keeps_lines_that_are_typed_ahead_at_a_terminal() {
    let command = format!("{} chat --temperature 0 --max-tokens 32 --no-history", env!("CARGO_BIN_EXE_flashd"));
    // Were lines lost, the Ctrl-D at their end would be too, and the program would wait.
    let mut child = Command::new("timeout")
        .args(["60", "script", "-qec", &command, "/dev/null"])
        .env_remove("FLASHD_LOG")
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = format!("{PROMPT}\n/think low\n/stats\n/nothink\n/quit\n");
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    for word in ["391", "thinking: low", "stats: on", "thinking: off"] {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_ends_with_1() {
    for command in ["chat", "complete"] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut child = flashd()
            .args([command, "--temperature", "0", "--max-tokens", "32"])
            .stdin(Stdio::piped())
            .stdout(full)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(format!("{PROMPT}\n{PROMPT}\n").as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{command}: {}", stderr(&output));
        assert!(stderr(&output).contains("No space left"), "{command}: {}", stderr(&output));
    }
}

fn mkfifo(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    path
}

#[test]
fn a_signal_ends_a_server_that_waits_for_its_files() {
    for signal in ["-TERM", "-INT"] {
        let dir = demo_copy();
        std::fs::remove_file(dir.path().join("config.json")).unwrap();
        // A file system that hangs: nobody ever writes into this pipe.
        mkfifo(dir.path(), "config.json");
        let mut server = Server::spawn(&["--model", dir.path().to_str().unwrap()]);
        server.wait_for("opening");
        server.signal(signal);
        let (code, lines) = server.end();
        assert_eq!(code, Some(0), "{signal}: {lines:#?}");
        assert!(lines.iter().any(|line| line.contains("shutdown complete")), "{lines:#?}");
    }
}

/// A server that is killed when the test ends.
struct Server {
    child: Child,
    port: u16,
    log: std::sync::mpsc::Receiver<String>,
    lines: Vec<String>,
}

impl Server {
    /// Starts one and waits until it listens.
    fn start(args: &[&str]) -> Self {
        let mut server = Self::spawn(args);
        let listening = server.wait_for("listening on http://");
        let address = listening.split("http://").nth(1).and_then(|rest| rest.split([';', '"']).next());
        server.port = address.and_then(|address| address.rsplit(':').next()).unwrap().parse().unwrap();
        server
    }

    fn spawn(args: &[&str]) -> Self {
        let mut child = flashd()
            .args(["serve", "--port", "0"])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("runs");
        let stream = child.stderr.take().expect("piped");
        let (sender, log) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { child, port: 0, log, lines: Vec::new() }
    }

    fn wait_for(&mut self, word: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        if let Some(line) = self.lines.iter().find(|line| line.contains(word)) {
            return line.clone();
        }
        while let Ok(line) = self.log.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            self.lines.push(line.clone());
            if line.contains(word) {
                return line;
            }
        }
        panic!("{word:?} is not in the log: {:#?}", self.lines);
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    fn ask(&self, request: &str) -> String {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn get(&self, path: &str) -> String {
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
    }

    fn post(&self, path: &str, headers: &str, body: &str) -> String {
        self.ask(&post_request(path, headers, body))
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    fn end(mut self) -> (Option<i32>, Vec<String>) {
        let deadline = Instant::now() + LIMIT;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "the server does not end: {:#?}", self.lines);
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut lines = std::mem::take(&mut self.lines);
        lines.extend(self.log.iter());
        (status.code(), lines)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn post_request(path: &str, headers: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n{headers}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn completion(max_tokens: u32, stream: bool) -> String {
    format!(
        r#"{{"model":"deepseek-v4-flash","prompt":"{PROMPT}","temperature":0,"max_tokens":{max_tokens},"stream":{stream}}}"#
    )
}

#[test]
fn serve_answers_and_drains_on_sigterm() {
    let mut server = Server::start(&[]);
    server.wait_for("Application startup complete");
    assert!(server.get("/health").starts_with("HTTP/1.1 200"));
    let answer = server.post("/v1/completions", "", &completion(32, false));
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("391"), "{answer}");
    // A stream that runs when the signal comes finishes, or ends with an error inside the bound.
    let mut stream = server.connect();
    let body = completion(4000, true).replace("\"stream\"", "\"ignore_eos\":true,\"stream\"");
    stream.write_all(post_request("/v1/completions", "", &body).as_bytes()).unwrap();
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    while !line.starts_with("data:") {
        line.clear();
        assert!(reader.read_line(&mut line).unwrap() > 0, "the stream ended before its first token");
    }
    server.signal("-TERM");
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]"), "{}", &rest[rest.len().saturating_sub(300)..]);
    let (code, lines) = server.end();
    assert_eq!(code, Some(0), "{lines:#?}");
    assert!(lines.iter().any(|line| line.contains("KV cache size: ")), "{lines:#?}");
    assert!(lines.iter().any(|line| line.contains("shutdown complete")), "{lines:#?}");
    assert!(!lines.iter().any(|line| line.contains("17 * 23")), "a prompt is in the log: {lines:#?}");
}

#[test]
fn a_second_signal_ends_at_once() {
    let mut server = Server::start(&["--shutdown-timeout", "3600"]);
    server.wait_for("Application startup complete");
    let mut stream = server.connect();
    let body = completion(60_000, true).replace("\"stream\"", "\"ignore_eos\":true,\"stream\"");
    stream.write_all(post_request("/v1/completions", "", &body).as_bytes()).unwrap();
    let mut first = [0; 1];
    stream.read_exact(&mut first).unwrap();
    server.signal("-INT");
    server.wait_for("shutting down");
    server.signal("-INT");
    let (code, lines) = server.end();
    assert_eq!(code, Some(130), "{lines:#?}");
}

#[test]
fn a_port_in_use_ends_with_5() {
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = run(&["serve", "--port", &port]);
    assert_eq!(output.status.code(), Some(5), "{}", stderr(&output));
    assert!(stderr(&output).contains(&port) && stderr(&output).contains("--port"), "{}", stderr(&output));
}

#[test]
fn keys_from_file_and_environment_are_asked_for_and_never_logged() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "api-key: [from-file]\nlog-format: json\ntrust-remote-code: true\n").unwrap();
    let mut server = Server::start(&["--config", file.path().to_str().unwrap()]);
    server.wait_for("Application startup complete");
    server.wait_for("--trust-remote-code has no effect");
    let body = completion(2, false);
    assert!(server.post("/v1/completions", "", &body).starts_with("HTTP/1.1 401"));
    let answer = server.post("/v1/completions", "Authorization: Bearer from-file\r\n", &body);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    server.signal("-TERM");
    let (code, lines) = server.end();
    assert_eq!(code, Some(0));
    assert!(lines.iter().all(|line| line.starts_with('{') && !line.contains("from-file")), "{lines:#?}");
}
