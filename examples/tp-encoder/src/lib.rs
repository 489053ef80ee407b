//! A tensor-parallel sentence encoder (BERT with mean pooling, such as all-MiniLM-L6-v2) on candle.
//! The model is split as in Megatron: each rank has some of the heads and some columns of the
//! feed-forward network. In each layer, each rank computes partial sums of the outputs of attention
//! and feed-forward network. Fusewire adds the partial sums and the residual and applies the
//! LayerNorm in one launch.
//!
//! ```
//! use fusewire::{Options, run_threads};
//! use tp_encoder::{Batch, Config, Encoder, FusedJoin, Shard, SingleProcess, Weights};
//!
//! let config = Config::tiny();
//! let weights = Weights::random(&config, 7)?;
//! let batch = Batch::new(&[vec![1, 5, 9, 2], vec![1, 7, 2]]);
//!
//! let whole = Encoder::new(&config, &weights, Shard::WHOLE, &candle_core::Device::Cpu)?;
//! let expected = whole.embed(&batch, &SingleProcess)?.to_vec2::<f32>()?;
//! let ranks = run_threads(2, &Options::default(), |comm| {
//!     let shard = Shard { rank: comm.rank() as usize, size: comm.size() as usize };
//!     let embed = || {
//!         let encoder = Encoder::new(&config, &weights, shard, &candle_core::Device::Cpu)?;
//!         anyhow::Ok(encoder.embed(&batch, &FusedJoin::new(&comm))?.to_vec2::<f32>()?)
//!     };
//!     Ok(embed())
//! });
//! for embeddings in ranks {
//!     let embeddings = embeddings??;
//!     let pairs = expected.iter().flatten().zip(embeddings.iter().flatten());
//!     assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-5));
//! }
//! # anyhow::Ok(())
//! ```

#[cfg(feature = "cuda")]
mod cuda;
mod encoder;
mod join;
pub mod launch;
pub mod measure;
mod operand;
pub mod report;
mod shard;
mod statistics;
pub mod text;
mod weights;
pub mod wheel;

use candle_core::Device;
use fusewire::Communicator;

pub use self::encoder::{Batch, Encoder};
pub use self::join::{FusedJoin, Join, SingleProcess, UnfusedJoin};
pub use self::operand::LayerNorm;
pub use self::shard::Shard;
pub use self::weights::{Config, Weights};

/// Returns `comm` on the stream that candle uses for `device`, so that the host need not wait
/// between candle's kernels and Fusewire's kernels. On the CPU, where calls block, returns `comm`
/// unchanged.
///
/// # Errors
/// Fails if Fusewire cannot use the stream.
pub fn on_stream_of(comm: &Communicator, device: &Device) -> anyhow::Result<Communicator> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => self::cuda::on_stream_of(comm, cuda),
        _ => Ok(comm.clone()),
    }
}
