//! Rules about hidden inputs and exits: environment, panics, anyhow, unbounded channels, globals.

use std::ops::RangeInclusive;

use quote::ToTokens;
use syn::spanned::Spanned;
use syn::visit::Visit;

use super::Finding;
use super::source::Source;

const ENVIRONMENT: [&str; 6] = ["var", "var_os", "vars", "vars_os", "set_var", "remove_var"];
const INTERIOR: [&str; 9] =
    ["OnceLock", "OnceCell", "LazyLock", "LazyCell", "Mutex", "RwLock", "RefCell", "Cell", "Lazy"];

/// The environment is read in src/config alone.
pub fn environment(source: &Source, findings: &mut Vec<Finding>) {
    if source.module().is_none_or(|module| module == "config") {
        return;
    }
    let mut report = |line: usize| {
        let what = "the environment is read only in src/config; take the value as an argument".into();
        findings.push(Finding { path: source.path.clone(), line, rule: "environment", what });
    };
    for name in source.names_after(&["env"]) {
        if ENVIRONMENT.contains(&name.text.as_str()) && !source.is_test(name.line) {
            report(name.line);
        }
    }
    // clap reads the environment through `#[arg(env = "…")]`.
    let mut in_arg = ArgEnv::default();
    in_arg.visit_file(&source.file);
    in_arg.lines.into_iter().filter(|&line| !source.is_test(line)).for_each(&mut report);
}

#[derive(Default)]
struct ArgEnv {
    lines: Vec<usize>,
}

impl<'ast> Visit<'ast> for ArgEnv {
    fn visit_attribute(&mut self, attr: &'ast syn::Attribute) {
        let is_clap = ["arg", "clap", "command"].iter().any(|name| attr.path().is_ident(name));
        if let (true, syn::Meta::List(list)) = (is_clap, &attr.meta) {
            let names_env = list
                .tokens
                .clone()
                .into_iter()
                .any(|token| matches!(token, proc_macro2::TokenTree::Ident(ident) if ident == "env"));
            if names_env {
                self.lines.push(attr.span().start().line);
            }
        }
    }
}

/// No `unwrap`, `expect`, `panic!`, `todo!` or `unimplemented!` outside tests, but where an `allow` gives its reason.
pub fn no_panics(source: &Source, findings: &mut Vec<Finding>) {
    let mut allowed = AllowedPanics::default();
    allowed.visit_file(&source.file);
    let is_allowed = |line: usize| allowed.ranges.iter().any(|range| range.contains(&line));
    for window in source.tokens.windows(3) {
        let [before, name, after] = window else { continue };
        let called = before.text == "." && after.text == "(";
        let is_method = called && ["unwrap", "expect", "unwrap_err", "expect_err"].contains(&name.text.as_str());
        let invoked = name.text == "!" && ["(", "{", "["].contains(&after.text.as_str());
        let is_macro = invoked && ["panic", "todo", "unimplemented"].contains(&before.text.as_str());
        if (is_method || is_macro) && !source.is_test(name.line) && !is_allowed(name.line) {
            let spelt = if is_method { name } else { before };
            findings.push(Finding {
                path: source.path.clone(),
                line: name.line,
                rule: "no-panic",
                what: format!("`{}` outside tests; return an error that names the fault", spelt.text),
            });
        }
    }
}

/// Lines of functions that carry `#[allow(clippy::expect_used)]` or the like.
#[derive(Default)]
struct AllowedPanics {
    ranges: Vec<RangeInclusive<usize>>,
}

impl AllowedPanics {
    fn note(&mut self, attrs: &[syn::Attribute], node: &impl Spanned) {
        let lints = ["clippy :: expect_used", "clippy :: unwrap_used", "clippy :: panic"];
        let allows = attrs.iter().filter(|attr| attr.path().is_ident("allow")).any(|attr| {
            let text = attr.meta.to_token_stream().to_string();
            lints.iter().any(|lint| text.contains(lint))
        });
        if allows {
            self.ranges.push(node.span().start().line..=node.span().end().line);
        }
    }
}

impl<'ast> Visit<'ast> for AllowedPanics {
    fn visit_item_fn(&mut self, node: &'ast syn::ItemFn) {
        self.note(&node.attrs, node);
        syn::visit::visit_item_fn(self, node);
    }

    fn visit_impl_item_fn(&mut self, node: &'ast syn::ImplItemFn) {
        self.note(&node.attrs, node);
        syn::visit::visit_impl_item_fn(self, node);
    }
}

/// `anyhow` is for main, cli and xtask; every other module has its own error enum.
pub fn anyhow_at_the_top(source: &Source, findings: &mut Vec<Finding>) {
    if source.module().is_none_or(|module| ["main", "cli"].contains(&module)) {
        return;
    }
    for token in source.tokens.iter().filter(|t| t.text == "anyhow" && !source.is_test(t.line)) {
        findings.push(Finding {
            path: source.path.clone(),
            line: token.line,
            rule: "anyhow",
            what: "anyhow belongs to main, cli and xtask; give this boundary a thiserror enum".into(),
        });
    }
}

/// Channels are bounded.
pub fn bounded_channels(source: &Source, findings: &mut Vec<Finding>) {
    let mut report = |line: usize, what: &str| {
        findings.push(Finding {
            path: source.path.clone(),
            line,
            rule: "bounded-channel",
            what: format!("{what} has no bound; a slow reader would grow it without limit"),
        });
    };
    for token in source.tokens.iter().filter(|token| !source.is_test(token.line)) {
        if ["unbounded_channel", "unbounded"].contains(&token.text.as_str()) {
            report(token.line, &token.text);
        }
    }
    let std_mpsc = source.names_after(&["std", "sync", "mpsc"]);
    for name in std_mpsc.iter().filter(|name| name.text == "channel" && !source.is_test(name.line)) {
        report(name.line, "std::sync::mpsc::channel");
    }
}

/// Mutable globals live in telemetry; operations and the CPU device may keep scratch memory a thread, which carries nothing
/// from call to call.
pub fn globals(source: &Source, findings: &mut Vec<Finding>) {
    if source.module().is_none_or(|module| module == "telemetry") {
        return;
    }
    let may_keep_scratch = source.module().is_some_and(|module| ["ops", "device"].contains(&module));
    let mut statics = Statics { lines: Vec::new(), may_keep_scratch };
    statics.visit_file(&source.file);
    for line in statics.lines.into_iter().filter(|&line| !source.is_test(line)) {
        findings.push(Finding {
            path: source.path.clone(),
            line,
            rule: "globals",
            what: "mutable state in a static; globals live only in src/telemetry, inputs are arguments".into(),
        });
    }
}

struct Statics {
    lines: Vec<usize>,
    may_keep_scratch: bool,
}

impl<'ast> Visit<'ast> for Statics {
    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        let ty = item.ty.to_token_stream().to_string();
        let mut words = ty.split(|c: char| !c.is_alphanumeric());
        let mutable = matches!(item.mutability, syn::StaticMutability::Mut(_));
        if mutable || words.any(|word| INTERIOR.contains(&word) || word.starts_with("Atomic")) {
            self.lines.push(item.span().start().line);
        }
    }

    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        if mac.path.is_ident("thread_local") && !self.may_keep_scratch {
            self.lines.push(mac.span().start().line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::findings_of;
    use super::*;

    fn broken(rule: fn(&Source, &mut Vec<Finding>), path: &str, line: &str) -> bool {
        findings_of(rule, path, &format!("//! x\n{line}\n")).first().is_some_and(|(at, _)| *at == 2)
    }

    #[test]
    fn the_environment_is_read_in_config() {
        for line in [
            "fn f() { std::env::var(\"A\"); }",
            "use std::env::{args, var_os};",
            "struct A { #[arg(long, env = \"A\")] a: u8 }",
        ] {
            assert!(broken(environment, "src/http/mod.rs", line), "{line}");
            assert!(!broken(environment, "src/config/args.rs", line), "{line}");
        }
        assert!(!broken(environment, "src/http/mod.rs", "fn f() { std::env::current_exe(); }"));
        assert!(!broken(environment, "tests/http.rs", "fn f() { std::env::var(\"A\"); }"));
    }

    #[test]
    fn panics_are_for_tests() {
        for line in
            ["fn f() { x.unwrap(); }", "fn f() { todo!() }", "fn f() { panic!(\"a\") }", "fn f() { x.expect(\"a\") }"]
        {
            assert!(broken(no_panics, "src/kv/pool.rs", line), "{line}");
        }
        assert!(!broken(no_panics, "src/kv/pool.rs", "fn f() { x.unwrap_or(0); }"));
        let allowed = "#[allow(clippy::expect_used)] fn f() { x.expect(\"a\"); }";
        assert!(!broken(no_panics, "src/kv/pool.rs", allowed));
        assert!(!broken(no_panics, "src/kv/pool.rs", "#[cfg(test)] mod tests { fn f() { x.unwrap(); } }"));
    }

    #[test]
    fn anyhow_stays_at_the_top() {
        assert!(broken(anyhow_at_the_top, "src/engine/tick.rs", "use anyhow::Result;"));
        assert!(!broken(anyhow_at_the_top, "src/cli/serve.rs", "use anyhow::Result;"));
        assert!(!broken(anyhow_at_the_top, "xtask/src/ci.rs", "use anyhow::Result;"));
    }

    #[test]
    fn channels_have_a_bound() {
        assert!(broken(bounded_channels, "src/engine/tick.rs", "fn f() { tokio::sync::mpsc::unbounded_channel(); }"));
        assert!(broken(bounded_channels, "src/engine/tick.rs", "use std::sync::mpsc::{channel, Sender};"));
        assert!(!broken(bounded_channels, "src/engine/tick.rs", "use std::sync::mpsc::sync_channel;"));
    }

    #[test]
    fn mutable_globals_are_refused() {
        for line in [
            "static mut A: u8 = 0;",
            "static A: std::sync::OnceLock<u8> = std::sync::OnceLock::new();",
            "static A: AtomicU64 = AtomicU64::new(0);",
            "thread_local! { static A: u8 = 0; }",
        ] {
            assert!(broken(globals, "src/kv/pool.rs", line), "{line}");
            assert!(!broken(globals, "src/telemetry/mod.rs", line), "{line}");
        }
        assert!(!broken(globals, "src/ops/linear.rs", "thread_local! { static PANEL: u8 = 0; }"));
        assert!(broken(globals, "src/ops/linear.rs", "static A: Mutex<u8> = Mutex::new(0);"));
        assert!(!broken(globals, "src/kv/pool.rs", "static TABLE: [u8; 2] = [1, 2];"));
    }
}
