//! Newtypes for every index that crosses a module boundary, so that a slot is never taken for a block.

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The value as an array index.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id!(
    /// An entry of the vocabulary. Only ids below `vocab_size` may reach a device.
    TokenId(u32)
);
id!(
    /// A KV block: the compressed rows of [`crate::model::cache::BLOCK_TOKENS`] tokens in every layer.
    BlockId(u32)
);
id!(
    /// A place for one running sequence: its window rings, sampling state and last token.
    SlotIdx(u32)
);
id!(
    /// A stored copy of one slot's window state.
    CheckpointId(u32)
);
id!(
    /// A layer of the trunk (0..num_hidden_layers), then the draft stages.
    LayerIdx(u32)
);
id!(
    /// A request, unique in the life of the process.
    RequestId(u64)
);
