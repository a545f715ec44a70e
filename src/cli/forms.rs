//! A checkpoint's tensors against its config.json: their names, types and shapes, which the headers tell, or every value.

use std::collections::BTreeMap;
use std::time::Duration;

use indicatif::ProgressBar;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::spec::{self, TensorSpec};
use crate::model::bind::BindError;
use crate::model::inventory::{self, STAGE_PREFIX};
use crate::model::shape::ModelShape;
use crate::model::weights::{BindWarning, Weights};

/// Checks a checkpoint and says in words what was checked, with the warnings.
///
/// With `full` the weights are bound as a server binds them, which reads every FP8 code and scale (a tenth of a real
/// checkpoint) in search of NaN; otherwise nothing but the headers is read. A server always checks in full: an FP8 weight
/// or scale that is NaN would spoil every answer that it touches.
///
/// # Errors
/// The first tensor that does not fit.
pub fn check(checkpoint: &Checkpoint, shape: &ModelShape, full: bool) -> Result<Vec<String>, BindError> {
    let mut said = Vec::new();
    if full {
        let spinner = ProgressBar::new_spinner().with_message("reading codes and scales");
        spinner.enable_steady_tick(Duration::from_millis(250));
        let weights = Weights::bind(checkpoint, shape);
        spinner.finish_and_clear();
        said.push("every tensor has its place, type and shape; no NaN codes".to_owned());
        said.extend(weights?.warnings.iter().map(|warning| format!("warning: {warning}")));
    } else {
        let n_absent_stages = check_forms(checkpoint, shape)?;
        said.push("every tensor has its place, type and shape; values were not read (--full reads them)".to_owned());
        if n_absent_stages > 0 {
            let warning = BindWarning::DraftStagesAbsent { n_stages: n_absent_stages };
            said.push(format!("warning: {warning}"));
        }
    }
    Ok(said)
}

/// Returns the draft stages that are absent: all or none of them.
fn check_forms(checkpoint: &Checkpoint, shape: &ModelShape) -> Result<usize, BindError> {
    let has_stages = checkpoint.tensors().any(|(name, _)| name.starts_with(STAGE_PREFIX));
    let wanted = inventory::tensors(shape, has_stages);
    let wanted: BTreeMap<&str, &TensorSpec> = wanted.iter().map(|spec| (spec.name.as_str(), spec)).collect();
    let mut missing = wanted.values().filter(|spec| checkpoint.tensor(&spec.name).is_none());
    if let Some(first) = missing.next() {
        let (tensor, want) = (first.name.clone(), first.form());
        return Err(BindError::Missing { tensor, want, n_missing: 1 + missing.count() });
    }
    let n_unexpected = checkpoint.n_tensors() - wanted.len();
    for (name, view) in checkpoint.tensors() {
        let got = spec::form(view.dtype, view.shape);
        let tensor = name.to_owned();
        match wanted.get(name).map(|spec| spec.form()) {
            None => return Err(BindError::Unexpected { tensor, got, n_unexpected }),
            Some(want) if want != got => return Err(BindError::Form { tensor, want, got }),
            Some(_) => {}
        }
    }
    Ok(if has_stages { 0 } else { shape.n_draft_stages() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::synth::{SynthPlan, write};

    /// Checks a sparse checkpoint of the demo model's shape, its tensors changed, in both ways, which must agree.
    fn check_changed(change: impl FnOnce(&mut Vec<TensorSpec>)) -> Result<Vec<String>, String> {
        let dir = crate::config::model::find("demo").unwrap();
        let config_json = std::fs::read(dir.join("config.json")).unwrap();
        let shape = ModelShape::from_json(&config_json).unwrap();
        let mut specs = inventory::tensors(&shape, true);
        change(&mut specs);
        let out = tempfile::tempdir().unwrap();
        let (shards, n_experts) = ([specs], shape.n_routed_experts);
        let plan = SynthPlan { config_json: &config_json, shards: &shards, seed: 0, n_experts, is_sparse: true };
        write(&out.path().join("m"), &plan, &|_| {}).unwrap();
        let checkpoint = Checkpoint::open(&out.path().join("m")).unwrap();
        let [quick, full] = [false, true].map(|full| check(&checkpoint, &shape, full).map_err(|e| e.to_string()));
        match (&quick, &full) {
            (Ok(quick), Ok(full)) => assert_eq!(quick.len(), full.len()),
            (quick, full) => assert_eq!(quick, full),
        }
        quick
    }

    #[test]
    fn headers_tell_what_the_binder_tells() {
        let said = check_changed(|_| {}).unwrap();
        assert!(said.len() == 1 && said[0].contains("values were not read"), "{said:?}");
        let name = "layers.1.attn.wkv.weight";
        let missing = check_changed(|specs| specs.retain(|spec| spec.name != name)).unwrap_err();
        assert!(missing.contains(name) && missing.contains("missing"), "{missing}");
        let extra = check_changed(|specs| {
            let spec = specs[0].clone();
            specs.push(TensorSpec { name: "x".to_owned(), ..spec });
        });
        assert!(extra.as_ref().is_err_and(|error| error.contains("no such tensor")), "{extra:?}");
        let turned = check_changed(|specs| {
            specs.iter_mut().filter(|spec| spec.name == name).for_each(|spec| spec.shape.reverse());
        });
        assert!(turned.as_ref().is_err_and(|error| error.contains("want F8_E4M3")), "{turned:?}");
    }
}
