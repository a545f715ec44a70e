//! Rules about the form of a file: its first line, where its tests stand, what its modules are called, reasons for allows.

use quote::ToTokens;
use syn::spanned::Spanned;
use syn::visit::Visit;

use super::Finding;
use super::source::{Source, is_test_only};

/// Names that say nothing about a module's job.
const EMPTY_NAMES: [&str; 8] = ["utils", "util", "helpers", "helper", "common", "misc", "shared", "stuff"];

/// Line 1 is `//!` and the file's job.
pub fn job_line(source: &Source, findings: &mut Vec<Finding>) {
    let first = source.lines.first().map_or("", String::as_str);
    let job = first.strip_prefix("//! ").unwrap_or("");
    if job.trim().is_empty() {
        findings.push(Finding {
            path: source.path.clone(),
            line: 1,
            rule: "job-line",
            what: "the first line must be `//! ` and the file's job in one sentence".into(),
        });
    }
}

/// Tests are the last item of a file.
pub fn tests_last(source: &Source, findings: &mut Vec<Finding>) {
    let mut tests_at = None;
    for item in &source.file.items {
        let line = item.span().start().line;
        match item {
            syn::Item::Mod(module) if module.content.is_some() && is_test_only(&module.attrs) => tests_at = Some(line),
            _ => {
                if let Some(tests) = tests_at {
                    findings.push(Finding {
                        path: source.path.clone(),
                        line,
                        rule: "file-order",
                        what: format!("this item stands after the tests of line {tests}; tests come last"),
                    });
                }
            }
        }
    }
}

/// A module's name says its job.
pub fn module_names(source: &Source, findings: &mut Vec<Finding>) {
    let mut note = |line: usize, name: &str| {
        findings.push(Finding {
            path: source.path.clone(),
            line,
            rule: "module-name",
            what: format!("`{name}` says nothing about the module's job; name it after what it does"),
        });
    };
    let stem = source.path.trim_end_matches(".rs").trim_end_matches("/mod").rsplit('/').next().unwrap_or("");
    if EMPTY_NAMES.contains(&stem) {
        note(1, stem);
    }
    for item in &source.file.items {
        if let syn::Item::Mod(module) = item
            && EMPTY_NAMES.contains(&module.ident.to_string().as_str())
        {
            note(module.ident.span().start().line, &module.ident.to_string());
        }
    }
}

/// No test is ignored: a slow one is a target of `cargo xtask ci --full`.
pub fn no_ignored_tests(source: &Source, findings: &mut Vec<Finding>) {
    for window in source.tokens.windows(3) {
        let [hash, open, name] = window else { continue };
        if hash.text == "#" && open.text == "[" && name.text == "ignore" {
            findings.push(Finding {
                path: source.path.clone(),
                line: name.line,
                rule: "ignored-test",
                what: "nobody runs an ignored test; make it fast, or a target of FULL_TESTS".into(),
            });
        }
    }
}

/// Every `allow` carries its reason: `reason = "…"`, or a comment on its line or the line above.
pub fn allow_has_reason(source: &Source, findings: &mut Vec<Finding>) {
    let mut visitor = Allows { source, findings };
    visitor.visit_file(&source.file);
}

struct Allows<'a> {
    source: &'a Source,
    findings: &'a mut Vec<Finding>,
}

impl<'ast> Visit<'ast> for Allows<'_> {
    fn visit_attribute(&mut self, attr: &'ast syn::Attribute) {
        let is_allow = attr.path().is_ident("allow") || attr.path().is_ident("expect");
        if !is_allow || attr.to_token_stream().to_string().contains("reason =") {
            return;
        }
        let (first, last) = (attr.span().start().line, attr.span().end().line);
        let line = |n: usize| self.source.lines.get(n.wrapping_sub(1)).map_or("", String::as_str);
        let above = line(first.wrapping_sub(1)).trim_start();
        let has_comment = line(last).contains("// ") || (above.starts_with("// ") || above.contains(" // "));
        if !has_comment {
            self.findings.push(Finding {
                path: self.source.path.clone(),
                line: first,
                rule: "allow-reason",
                what: "an `allow` needs its reason: a comment on the line, or `reason = \"…\"`".into(),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::findings_of;
    use super::*;

    #[test]
    fn the_first_line_is_the_job() {
        assert_eq!(findings_of(job_line, "src/a.rs", "fn f() {}\n").len(), 1);
        assert_eq!(findings_of(job_line, "src/a.rs", "//!\nfn f() {}\n").len(), 1);
        assert!(findings_of(job_line, "src/a.rs", "//! Does one thing.\nfn f() {}\n").is_empty());
    }

    #[test]
    fn nothing_follows_the_tests() {
        let broken = "//! x\n#[cfg(test)]\nmod tests {}\nfn late() {}\n";
        assert_eq!(findings_of(tests_last, "src/a.rs", broken)[0].0, 4);
        let good = "//! x\n#[cfg(test)]\nmod simulation;\nfn f() {}\n#[cfg(test)]\nmod tests {}\n";
        assert!(findings_of(tests_last, "src/a.rs", good).is_empty());
    }

    #[test]
    fn empty_module_names_are_refused() {
        assert_eq!(findings_of(module_names, "src/kv/utils.rs", "//! x\n").len(), 1);
        assert_eq!(findings_of(module_names, "src/kv/common/mod.rs", "//! x\n").len(), 1);
        assert_eq!(findings_of(module_names, "src/kv/mod.rs", "//! x\nmod helpers;\n")[0].0, 2);
        assert!(findings_of(module_names, "src/kv/mod.rs", "//! x\nmod pool;\n").is_empty());
    }

    #[test]
    fn no_test_is_ignored() {
        let broken = "//! x\n#[test]\n#[ignore = \"slow\"]\nfn f() {}\n";
        assert_eq!(findings_of(no_ignored_tests, "tests/a.rs", broken)[0].0, 3);
        assert!(findings_of(no_ignored_tests, "tests/a.rs", "//! x\n#[test]\nfn ignore() {}\n").is_empty());
    }

    #[test]
    fn an_allow_says_why() {
        let broken = "//! x\n\n#[allow(dead_code)]\nfn f() {}\n";
        assert_eq!(findings_of(allow_has_reason, "src/a.rs", broken)[0].0, 3);
        for good in [
            "//! x\n#[allow(dead_code)] // Read by the debugger.\nfn f() {}\n",
            "//! x\n// Read by the debugger.\n#[allow(dead_code)]\nfn f() {}\n",
            "//! x\n#[allow(dead_code, reason = \"read by the debugger\")]\nfn f() {}\n",
        ] {
            assert!(findings_of(allow_has_reason, "src/a.rs", good).is_empty(), "{good}");
        }
    }
}
