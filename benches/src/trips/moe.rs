//! Dispatch and combine of a mixture of experts, with uniform routing.

use anyhow::Result;
use fusewire::{
    Communicator, DType, Dispatched, Moe, MoeConfig, MoeLayout, MoePayload, MoeScales, Tensor,
};

use super::Arguments;
use crate::moe::Routing;

/// Experts of all ranks, and of a token: those of DeepSeek-V3.
const ROUTING: Routing = Routing::uniform(256, 8);

/// The operations of a configuration, and their tensors.
pub(super) struct Layer<'c> {
    comm: &'c Communicator,
    hidden: usize,
    moe: Moe,
    y: Tensor,
}

/// Tensors of a number of tokens.
pub(super) struct Tokens {
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
}

impl<'c> Layer<'c> {
    /// Creates the layer of the operation `name`, whose words select the payload and the layout.
    pub(super) fn new(comm: &'c Communicator, name: &str, arguments: &Arguments) -> Result<Self> {
        let hidden = arguments.hidden;
        let most = arguments.tokens.iter().copied().max().unwrap_or(0);
        let (experts, top_k) = (ROUTING.experts(), ROUTING.top_k());
        let mut config = MoeConfig::new(experts, top_k, hidden, most);
        if name.contains("fp8") {
            config = config.payload(MoePayload::Fp8(MoeScales::F32));
        }
        if name.contains("rank_major") {
            config = config.layout(MoeLayout::RankMajor);
        }
        let moe = Moe::new(comm, &config)?;
        let y = comm.tensor(DType::Bf16, moe.info().results * hidden)?;
        Ok(Self {
            comm,
            hidden,
            moe,
            y,
        })
    }

    pub(super) fn tokens(&self, count: usize) -> Result<Tokens> {
        let (comm, items) = (self.comm, count * ROUTING.top_k() as usize);
        let x = comm.tensor(DType::Bf16, count * self.hidden)?;
        x.copy_from_bytes(&vec![0; 2 * count * self.hidden])?;
        Ok(Tokens {
            x,
            ids: comm.tensor_from(&ROUTING.experts_of(count, comm.rank()))?,
            weights: comm.tensor_from(&vec![0.125f32; items])?,
            out: comm.tensor(DType::Bf16, count * self.hidden)?,
        })
    }

    pub(super) fn dispatch(&self, tokens: &Tokens) -> Result<Dispatched> {
        let Tokens {
            x, ids, weights, ..
        } = tokens;
        Ok(self.moe.dispatch(x, ids, weights)?)
    }

    pub(super) fn combine(&self, tokens: &Tokens, received: &Dispatched) -> Result<()> {
        Ok(self.moe.combine(&self.y, received, &tokens.out)?)
    }

    /// Frees the memory. All ranks call this together.
    pub(super) fn free(self) -> Result<()> {
        Ok(self.moe.free()?)
    }
}
