//! The table of device kernels' tests: each case runs one kernel and says how far its result is from the reference.

use crate::device::{Device, DeviceError};

pub mod batch;
pub mod data;

/// How far a result is from what it should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Deviation {
    /// The largest deviation of any element, in the case's own measure; infinite where a value is not finite.
    pub worst: f64,
    /// What is still right; 0 where the result must be exact.
    pub limit: f64,
}

impl Deviation {
    /// Whether the result is right; a NaN is not.
    #[must_use]
    pub fn is_ok(self) -> bool {
        self.worst <= self.limit
    }

    /// A result that must be exact: the number of elements that differ.
    #[must_use]
    pub fn exact<T: PartialEq>(got: &[T], want: &[T]) -> Self {
        if got.len() != want.len() {
            return Self { worst: f64::INFINITY, limit: 0.0 };
        }
        let n_wrong = got.iter().zip(want).filter(|(got, want)| got != want).count();
        Self { worst: n_wrong as f64, limit: 0.0 }
    }

    /// The largest absolute difference. A value that is not finite where the reference is, or the other way round, is
    /// infinitely wrong; equal infinities and two NaNs are right.
    #[must_use]
    pub fn absolute(got: &[f32], want: &[f64], limit: f64) -> Self {
        if got.len() != want.len() {
            return Self { worst: f64::INFINITY, limit };
        }
        let differences = got.iter().zip(want).map(|(got, want)| {
            let got = f64::from(*got);
            if got == *want || (got.is_nan() && want.is_nan()) {
                return 0.0;
            }
            let difference = (got - want).abs();
            if difference.is_nan() { f64::INFINITY } else { difference }
        });
        Self { worst: differences.fold(0.0, f64::max), limit }
    }

    /// As [`Deviation::absolute`], divided by `scale`, such as the reference's largest value.
    #[must_use]
    pub fn scaled(got: &[f32], want: &[f64], scale: f64, limit: f64) -> Self {
        let absolute = Self::absolute(got, want, limit);
        let worst = if absolute.worst == 0.0 { 0.0 } else { absolute.worst / scale };
        Self { worst, limit }
    }
}

/// A case that could not be judged.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CaseError {
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The result breaks a rule that has no measure: two runs that differ, a write outside the output.
    #[error("{0}")]
    Rule(String),
}

/// What a case does.
pub type Run = Box<dyn Fn(&Device) -> Result<Deviation, CaseError> + Send + Sync>;

/// One kernel on one shape with one kind of data.
pub struct OpCase {
    /// The kernel.
    pub op: &'static str,
    /// Shape and data in words, unique in the op.
    pub name: String,
    /// Runs it.
    pub run: Run,
}

impl OpCase {
    /// A case.
    pub fn new(
        op: &'static str,
        name: impl Into<String>,
        run: impl Fn(&Device) -> Result<Deviation, CaseError> + Send + Sync + 'static,
    ) -> Self {
        Self { op, name: name.into(), run: Box::new(run) }
    }
}

/// Every case of every op: what `flashd selftest ops` runs. An op with kernels adds its `cases()` here.
#[must_use]
pub fn all() -> Vec<OpCase> {
    let ops: [fn() -> Vec<OpCase>; 21] = [
        super::attention::device::cases,
        super::combine::cases,
        super::copy::cases,
        super::embed::device::cases,
        super::expert_linear::cases,
        super::fill::cases,
        super::hyper_head::device::cases,
        super::hyper_mix::device::cases,
        super::hyper_post::device::cases,
        super::index_score::device::cases,
        super::latent::cases,
        super::linear::device::cases,
        super::primitives::cases,
        super::query::cases,
        super::read::cases,
        super::repack::cases,
        super::ring_store::cases,
        super::route::device::cases,
        super::sample::device::cases,
        super::swiglu::device::cases,
        super::top_k::device::cases,
    ];
    ops.into_iter().flat_map(|cases| cases()).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_value_that_is_not_finite_is_wrong_unless_the_reference_has_it_too() {
        let limit = 1e-3;
        let worst = |got: f32, want: f64| Deviation::absolute(&[0.0, got], &[0.0, want], limit).worst;
        assert_eq!(worst(f32::NAN, 1.0), f64::INFINITY);
        assert_eq!(worst(1.0, f64::NAN), f64::INFINITY);
        assert_eq!(worst(f32::INFINITY, f64::NEG_INFINITY), f64::INFINITY);
        assert_eq!(worst(f32::NAN, f64::NAN), 0.0);
        assert_eq!(worst(f32::NEG_INFINITY, f64::NEG_INFINITY), 0.0);
        assert_eq!(worst(1.5, 1.0), 0.5);
        assert!(!Deviation { worst: f64::NAN, limit }.is_ok());
    }

    #[test]
    fn another_length_is_wrong() {
        assert!(!Deviation::exact(&[1_u8], &[1, 2]).is_ok());
        assert!(!Deviation::absolute(&[1.0], &[], 1.0).is_ok());
        assert!(Deviation::exact(&[1_u8, 2], &[1, 2]).is_ok());
        assert!(!Deviation::exact(&[1_u8, 3], &[1, 2]).is_ok());
    }

    #[test]
    fn a_case_runs_on_every_device() {
        let case = OpCase::new("device", "a round trip", |device| {
            let buffer = device.alloc(4)?;
            device.upload(&buffer, 0, &[1, 2, 3, 4])?;
            let mut home = [0; 4];
            device.download(&buffer, 0, &mut home)?;
            Ok(Deviation::exact(&home, &[1, 2, 3, 4]))
        });
        crate::device::testing::run_cases(&[case]);
    }

    #[test]
    fn cases_of_an_op_have_different_names() {
        let mut seen = BTreeSet::new();
        for case in all() {
            assert!(seen.insert((case.op, case.name.clone())), "{} {}", case.op, case.name);
        }
    }
}
