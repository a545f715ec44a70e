//! Rules about the direction of imports: modules form one list and look only down it.

use super::Finding;
use super::source::Source;

/// Modules of the library from top to bottom; those of one entry may import each other.
const ORDER: [&[&str]; 14] = [
    &["main", "cli", "lib"],
    &["config"],
    &["http"],
    &["chat"],
    &["tokenizer"],
    &["engine"],
    &["kv"],
    &["model"],
    &["ops"],
    &["sample"],
    &["checkpoint"],
    &["tuning"],
    &["device"],
    &["mmap", "ids", "telemetry", "tensor"],
];

/// Path prefixes whose code is a function of its arguments: no device, no async.
const PURE: [&str; 4] = ["src/engine/scheduler", "src/kv", "src/sample", "src/tuning"];

/// Imports point only down the list.
pub fn direction(source: &Source, findings: &mut Vec<Finding>) {
    let Some(module) = source.module() else { return };
    let mut report = |line: usize, rule_text: String| {
        findings.push(Finding { path: source.path.clone(), line, rule: "import-direction", what: rule_text });
    };
    let Some(own) = rank(module) else {
        report(1, format!("module `{module}` has no place in the order of xtask/src/tidy/imports.rs"));
        return;
    };
    for name in imported_modules(source) {
        if source.is_test(name.line) || name.text == module {
            continue;
        }
        match rank(&name.text) {
            Some(theirs) if theirs < own => report(
                name.line,
                format!("`{module}` imports `{}`, which stands above it; imports point only down the list", name.text),
            ),
            _ => {}
        }
    }
}

/// Scheduler, KV, sampling and tuning know no device and no async runtime.
pub fn pure_modules(source: &Source, findings: &mut Vec<Finding>) {
    if !PURE.iter().any(|prefix| source.path.starts_with(prefix)) {
        return;
    }
    let is_scheduler = source.path.starts_with("src/engine/scheduler");
    let mut report = |line: usize, what: &str| {
        findings.push(Finding {
            path: source.path.clone(),
            line,
            rule: "pure-module",
            what: format!("{what} in a module that must be a function of its arguments"),
        });
    };
    for name in imported_modules(source).iter().filter(|name| name.text == "device" && !source.is_test(name.line)) {
        report(name.line, "a device");
    }
    for token in source.tokens.iter().filter(|token| !source.is_test(token.line)) {
        match token.text.as_str() {
            "async" | "await" | "tokio" | "futures" => report(token.line, "async"),
            "Instant" | "SystemTime" if is_scheduler => report(token.line, "a clock"),
            _ => {}
        }
    }
}

/// Top-level modules named by `crate::x`, `flashd::x` or as many `super::` as lead to the root.
fn imported_modules(source: &Source) -> Vec<super::source::Token> {
    let mut names = source.names_after(&["crate"]);
    names.extend(source.names_after(&["flashd"]));
    let to_root = vec!["super"; source.depth()];
    if !to_root.is_empty() {
        names.extend(source.names_after(&to_root));
    }
    names
}

fn rank(module: &str) -> Option<usize> {
    ORDER.iter().position(|entry| entry.contains(&module))
}

#[cfg(test)]
mod tests {
    use super::super::findings_of;
    use super::*;

    #[test]
    fn an_import_that_points_up_is_found() {
        for (path, line) in [
            ("src/kv/pool.rs", "use crate::engine::tick;"),
            ("src/kv/pool.rs", "use crate::{ids::BlockId, http::router};"),
            ("src/kv/pool.rs", "use super::super::engine::tick;"),
            ("src/kv/mod.rs", "use super::engine::tick;"),
            ("src/ids.rs", "fn f() { crate::device::cpu::g() }"),
        ] {
            assert_eq!(findings_of(direction, path, &format!("//! x\n{line}\n"))[0].0, 2, "{line}");
        }
    }

    #[test]
    fn imports_that_point_down_or_across_are_fine() {
        for (path, line) in [
            ("src/engine/tick.rs", "use crate::kv::pool;\nuse super::scheduler;"),
            ("src/mmap.rs", "use crate::ids::BlockId;"),
            ("src/main.rs", "use flashd::cli;"),
            ("src/kv/pool.rs", "#[cfg(test)]\nmod tests {\n use crate::engine::tick;\n}"),
            ("tests/http.rs", "use flashd::http;"),
        ] {
            assert!(findings_of(direction, path, &format!("//! x\n{line}\n")).is_empty(), "{line}");
        }
    }

    #[test]
    fn a_new_module_needs_its_place() {
        assert!(findings_of(direction, "src/extra.rs", "//! x\n")[0].1.contains("no place"));
    }

    #[test]
    fn pure_modules_stay_pure() {
        for (path, line) in [
            ("src/engine/scheduler.rs", "use crate::device::DeviceError;"),
            ("src/engine/scheduler/plan.rs", "fn f() -> std::time::Instant { g() }"),
            ("src/kv/pool.rs", "async fn f() {}"),
            ("src/sample/noise.rs", "use tokio::sync::mpsc;"),
        ] {
            assert_eq!(findings_of(pure_modules, path, &format!("//! x\n{line}\n"))[0].0, 2, "{line}");
        }
        assert!(findings_of(pure_modules, "src/engine/tick.rs", "//! x\nuse tokio::sync::mpsc;\n").is_empty());
    }
}
