//! What a tensor is called and looks like, without its bytes.

pub use safetensors::Dtype;

/// Name, element type and shape of one tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Full name, such as `layers.3.attn.wq_a.weight`.
    pub name: String,
    /// Stored element type; MXFP4 codes are `I8`, two a byte.
    pub dtype: Dtype,
    /// Stored shape, row-major.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Stored elements.
    #[must_use]
    pub fn n_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Stored bytes of one element.
    #[must_use]
    pub fn element_bytes(&self) -> usize {
        self.dtype.bitsize() / 8
    }

    /// Stored bytes.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        self.n_elements() * self.element_bytes()
    }

    /// Element type and shape as messages show them.
    #[must_use]
    pub fn form(&self) -> String {
        form(self.dtype, &self.shape)
    }
}

/// Element type and shape as messages show them: `BF16 [512, 256]`.
#[must_use]
pub fn form(dtype: Dtype, shape: &[usize]) -> String {
    format!("{dtype} {shape:?}")
}
