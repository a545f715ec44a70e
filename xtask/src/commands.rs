//! Documented commands: every `flashd` command line in the documents names subcommands and flags that the binary knows.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail, ensure};

/// A command line shown in a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// Document and line.
    pub place: String,
    /// Arguments after `flashd`.
    pub args: Vec<String>,
}

/// Checks the README, docs/ and the READMEs of tools/.
pub fn check(root: &Path) -> anyhow::Result<()> {
    let shown = documents(root)?;
    let mut helps = HashMap::new();
    for command in &shown {
        check_one(command, &mut |subcommands: &[&str]| {
            let key = subcommands.join(" ");
            if !helps.contains_key(&key) {
                helps.insert(key.clone(), help(root, subcommands)?);
            }
            Ok(helps[&key].clone())
        })
        .with_context(|| format!("{}: flashd {}", command.place, command.args.join(" ")))?;
    }
    println!("{} documented commands name subcommands and flags that exist", shown.len());
    Ok(())
}

fn documents(root: &Path) -> anyhow::Result<Vec<Shown>> {
    let mut paths = vec![root.join("README.md"), root.join("tools/demo-model/README.md")];
    for entry in std::fs::read_dir(root.join("docs"))? {
        paths.push(entry?.path());
    }
    paths.sort();
    let mut shown = Vec::new();
    for path in paths.iter().filter(|path| path.extension().is_some_and(|end| end == "md")) {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        shown.extend(commands_in(&path.strip_prefix(root)?.display().to_string(), &text));
    }
    Ok(shown)
}

/// `flashd` command lines in the fenced `sh` blocks of a document; lines that end in a backslash go on.
pub fn commands_in(name: &str, text: &str) -> Vec<Shown> {
    let mut shown = Vec::new();
    let mut in_shell = false;
    let mut pending = String::new();
    for (idx, line) in text.lines().enumerate() {
        if let Some(fence) = line.trim_start().strip_prefix("```") {
            in_shell = !in_shell && fence.trim() == "sh";
            continue;
        }
        if !in_shell {
            continue;
        }
        if let Some(open) = line.strip_suffix('\\') {
            pending.push_str(open);
            continue;
        }
        let whole = std::mem::take(&mut pending) + line;
        if let Some(args) = flashd_args(&words(&whole)) {
            shown.push(Shown { place: format!("{name}:{}", idx + 1), args });
        }
    }
    shown
}

/// Arguments of the binary in a command line, or none when it is another program's.
fn flashd_args(words: &[String]) -> Option<Vec<String>> {
    let start = words.iter().position(|word| !word.contains('=') || word.starts_with('-'))?;
    let words = &words[start..];
    let args = match words.first()?.as_str() {
        "flashd" | "./flashd" | "target/release/flashd" => &words[1..],
        "cargo" if words.get(1)?.as_str() == "run" => {
            let split = words.iter().position(|word| word == "--")?;
            &words[split + 1..]
        }
        _ => return None,
    };
    let end = args.iter().position(|word| ["|", ">", "<", "&", "&&", ";"].contains(&word.as_str()));
    Some(args[..end.unwrap_or(args.len())].to_vec())
}

/// Splits a line as a shell would: spaces, single and double quotes, `#` starts a comment.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match (quote, c) {
            (Some(q), _) if c == q => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, _) if c.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// Walks the subcommands by their help and looks for every flag in the last one's.
fn check_one(shown: &Shown, help: &mut dyn FnMut(&[&str]) -> anyhow::Result<String>) -> anyhow::Result<()> {
    let mut path: Vec<&str> = Vec::new();
    let mut text = help(&path)?;
    let mut rest = shown.args.as_slice();
    while let Some((first, after)) = rest.split_first() {
        if first.starts_with('-') || !has_subcommands(&text) {
            break;
        }
        ensure!(lists_subcommand(&text, first), "`{first}` is no subcommand of `flashd {}`", path.join(" "));
        path.push(first);
        text = help(&path)?;
        rest = after;
    }
    for arg in rest.iter().filter(|arg| arg.len() > 1 && arg.starts_with('-') && arg.parse::<f64>().is_err()) {
        let flag = arg.split('=').next().unwrap_or(arg);
        if !has_flag(&text, flag) {
            bail!("`{flag}` is no flag of `flashd {}`", path.join(" "));
        }
    }
    Ok(())
}

fn has_subcommands(help: &str) -> bool {
    help.contains("\nCommands:")
}

fn lists_subcommand(help: &str, name: &str) -> bool {
    let after = help.split("\nCommands:").nth(1).unwrap_or("");
    after
        .lines()
        .skip(1)
        .take_while(|line| line.starts_with(' '))
        .any(|line| line.split_whitespace().next() == Some(name))
}

fn has_flag(help: &str, flag: &str) -> bool {
    help.split(|c: char| c.is_whitespace() || ",=[]<>".contains(c)).any(|word| word == flag)
}

fn help(root: &Path, subcommands: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("cargo")
        .args(["run", "--quiet", "--release", "--bin", "flashd", "--"])
        .args(subcommands)
        .arg("--help")
        .current_dir(root)
        .output()?;
    ensure!(output.status.success(), "--help failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP: &str = "flashd\n\nUsage: flashd <COMMAND>\n\nCommands:\n  serve  Serve the model\n  debug  Look inside\n\nOptions:\n  -h, --help\n";
    const SERVE: &str =
        "Usage: flashd serve [OPTIONS]\n\nOptions:\n      --port <PORT>  [default: 8000]\n  -h, --help\n";

    fn check_line(line: &str) -> anyhow::Result<()> {
        let shown = commands_in("README.md", &format!("```sh\n{line}\n```\n"));
        assert_eq!(shown.len(), 1, "{line}");
        check_one(&shown[0], &mut |path| Ok(if path.is_empty() { TOP } else { SERVE }.to_owned()))
    }

    #[test]
    fn commands_are_taken_from_shell_fences_only() {
        let text = "flashd no\n```sh\nA=1 cargo run --release -- serve --port 1 # why\ncurl x\nflashd debug \\\n  --help | head\n```\n```text\nflashd no\n```\n";
        let shown: Vec<_> = commands_in("a.md", text).into_iter().map(|c| (c.place, c.args.join(" "))).collect();
        assert_eq!(shown, [("a.md:3".into(), "serve --port 1".into()), ("a.md:6".into(), "debug --help".into())]);
    }

    #[test]
    fn known_commands_pass() {
        for line in ["cargo run --release -- serve", "flashd serve --port 1", "flashd serve --port=1", "flashd --help"]
        {
            assert!(check_line(line).is_ok(), "{line}");
        }
    }

    #[test]
    fn unknown_names_are_refused() {
        for line in ["flashd sevre", "flashd serve --prot 1", "flashd --version", "flashd serve --por 1"] {
            assert!(check_line(line).is_err(), "{line}");
        }
    }
}
