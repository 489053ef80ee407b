//! The encoder: BERT, followed by the mean over a sentence's tokens, normalized to length 1.

use anyhow::{Result, ensure};
use candle_core::{D, Device, Tensor};
use candle_nn::ops::softmax_last_dim;

use crate::{Config, Join, LayerNorm, Shard, Weights};

/// Tokens of sentences, padded to the length of the longest sentence.
#[derive(Clone, Debug)]
pub struct Batch {
    ids: Vec<u32>,
    lengths: Vec<usize>,
    longest: usize,
}

impl Batch {
    /// Creates a batch of `sentences`, which are given as token numbers. Pads them with 0. The
    /// padding does not affect the embeddings.
    pub fn new(sentences: &[Vec<u32>]) -> Self {
        let lengths: Vec<usize> = sentences.iter().map(Vec::len).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let padded = |ids: &Vec<u32>| {
            let padding = core::iter::repeat_n(0, longest - ids.len());
            ids.iter().copied().chain(padding).collect::<Vec<u32>>()
        };
        Self {
            ids: sentences.iter().flat_map(padded).collect(),
            lengths,
            longest,
        }
    }

    /// Returns the number of sentences.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Returns true if there are no sentences.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// Returns the number of tokens of the longest sentence. All sentences are padded to this
    /// length.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Returns a tensor `[sentences, longest]` with `one` for tokens and `other` for padding.
    fn marks(&self, one: f32, other: f32, device: &Device) -> candle_core::Result<Tensor> {
        let marks = self.lengths.iter().flat_map(|&length| {
            (0..self.longest).map(move |at| if at < length { one } else { other })
        });
        Tensor::from_vec(marks.collect(), (self.len(), self.longest), device)
    }
}

/// A linear layer, or one rank's part of a linear layer.
#[derive(Debug)]
struct Linear {
    /// Shape `[out, in]`.
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// Maps `[rows, in]` to `[rows, out]`.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let product = x.matmul(&self.weight.t()?)?;
        match &self.bias {
            Some(bias) => product.broadcast_add(bias),
            None => Ok(product),
        }
    }
}

/// Reads the tensors of a model, slices them for a rank and moves the slices to a device.
struct Loader<'a> {
    weights: &'a Weights,
    shard: Shard,
    device: &'a Device,
}

impl Loader<'_> {
    fn whole(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        Ok(self.weights.tensor(name, shape)?.to_device(self.device)?)
    }

    fn norm(&self, name: &str, config: &Config) -> Result<LayerNorm> {
        Ok(LayerNorm {
            weight: self.whole(&format!("{name}.weight"), &[config.hidden_size])?,
            bias: self.whole(&format!("{name}.bias"), &[config.hidden_size])?,
            epsilon: config.layer_norm_eps as f32,
        })
    }

    /// Returns a column-parallel layer. It concatenates this rank's outputs of all layers in
    /// `names` and includes their biases.
    fn columns(&self, names: &[String], out: usize, input: usize) -> Result<Linear> {
        let cut = |part: &str, shape: &[usize]| -> Result<Tensor> {
            let parts = names
                .iter()
                .map(|name| {
                    let whole = self.weights.tensor(&format!("{name}.{part}"), shape)?;
                    Ok(self.shard.of(&whole, 0)?)
                })
                .collect::<Result<Vec<Tensor>>>()?;
            Ok(Tensor::cat(&parts, 0)?.to_device(self.device)?)
        };
        Ok(Linear {
            weight: cut("weight", &[out, input])?,
            bias: Some(cut("bias", &[out])?),
        })
    }

    /// Returns a row-parallel layer. The layer has only this rank's inputs, so the outputs of all
    /// ranks sum to the output of the whole layer. Only rank 0 has the bias, because the sum must
    /// contain the bias once. Adding the bias to the residual instead would take another pass over
    /// the residual on every rank.
    fn rows(&self, name: &str, out: usize, input: usize) -> Result<Linear> {
        let weight = self
            .weights
            .tensor(&format!("{name}.weight"), &[out, input])?;
        let bias = self.whole(&format!("{name}.bias"), &[out])?;
        Ok(Linear {
            weight: self.shard.of(&weight, 1)?.to_device(self.device)?,
            bias: (self.shard.rank == 0).then_some(bias),
        })
    }
}

/// One rank's part of a transformer layer.
#[derive(Debug)]
struct Layer {
    /// Projections to the queries, keys and values of this rank's heads.
    attention: Linear,
    attention_output: Linear,
    attention_norm: LayerNorm,
    up: Linear,
    down: Linear,
    norm: LayerNorm,
    heads: usize,
}

impl Layer {
    fn new(loader: &Loader<'_>, config: &Config, index: usize) -> Result<Self> {
        let (hidden, wide) = (config.hidden_size, config.intermediate_size);
        let at = |name: &str| format!("encoder.layer.{index}.{name}");
        let three = ["query", "key", "value"].map(|name| at(&format!("attention.self.{name}")));
        Ok(Self {
            attention: loader.columns(&three, hidden, hidden)?,
            attention_output: loader.rows(&at("attention.output.dense"), hidden, hidden)?,
            attention_norm: loader.norm(&at("attention.output.LayerNorm"), config)?,
            up: loader.columns(&[at("intermediate.dense")], wide, hidden)?,
            down: loader.rows(&at("output.dense"), hidden, wide)?,
            norm: loader.norm(&at("output.LayerNorm"), config)?,
            heads: config.num_attention_heads / loader.shard.size,
        })
    }

    /// Computes the layer. `x` and the result have shape `[sentences * longest, hidden]` and are
    /// equal on all ranks. `mask` is added to the attention scores.
    fn forward(
        &self,
        x: &Tensor,
        batch: &Batch,
        mask: &Tensor,
        join: &dyn Join,
    ) -> candle_core::Result<Tensor> {
        let context = self.attend(&self.attention.forward(x)?, batch, mask)?;
        let partial = self.attention_output.forward(&context)?;
        let x = join.join(partial, x, &self.attention_norm)?;
        let partial = self.down.forward(&self.up.forward(&x)?.gelu_erf()?)?;
        join.join(partial, &x, &self.norm)
    }

    /// Computes attention. Maps `[tokens, 3 * width]` to `[tokens, width]`, where `width` is the
    /// total width of this rank's heads.
    fn attend(&self, all: &Tensor, batch: &Batch, mask: &Tensor) -> candle_core::Result<Tensor> {
        let width = all.dim(1)? / 3;
        let heads = |index: usize| {
            all.narrow(1, index * width, width)?
                .reshape((batch.len(), batch.longest, self.heads, width / self.heads))?
                .transpose(1, 2)?
                .contiguous()
        };
        let (queries, keys, values) = (heads(0)?, heads(1)?, heads(2)?);
        let scale = 1.0 / ((width / self.heads) as f64).sqrt();
        let scores = (queries * scale)?.matmul(&keys.t()?)?;
        let weights = softmax_last_dim(&scores.broadcast_add(mask)?)?;
        let context = weights.matmul(&values)?;
        context
            .transpose(1, 2)?
            .reshape((batch.len() * batch.longest, width))
    }
}

/// The encoder, or one rank's part of the encoder. Every rank has the whole embedding tables.
#[derive(Debug)]
pub struct Encoder {
    words: Tensor,
    /// Embeddings of the positions, each plus the embedding of the first token type, because all
    /// tokens have this type.
    positions: Tensor,
    norm: LayerNorm,
    layers: Vec<Layer>,
    device: Device,
}

impl Encoder {
    /// Slices `weights` for one rank and moves them to `device`.
    ///
    /// # Errors
    /// Fails if a weight is missing or has a wrong shape, if the model cannot be divided by the
    /// number of ranks, or if candle fails.
    pub fn new(config: &Config, weights: &Weights, shard: Shard, device: &Device) -> Result<Self> {
        shard.check(config)?;
        let loader = Loader {
            weights,
            shard,
            device,
        };
        let hidden = config.hidden_size;
        let table = |name: &str, rows: usize| {
            loader.whole(
                &format!("embeddings.{name}_embeddings.weight"),
                &[rows, hidden],
            )
        };
        let types = table("token_type", config.type_vocab_size)?;
        let positions = table("position", config.max_position_embeddings)?;
        Ok(Self {
            words: table("word", config.vocab_size)?,
            positions: positions.broadcast_add(&types.narrow(0, 0, 1)?)?,
            norm: loader.norm("embeddings.LayerNorm", config)?,
            layers: (0..config.num_hidden_layers)
                .map(|index| Layer::new(&loader, config, index))
                .collect::<Result<_>>()?,
            device: device.clone(),
        })
    }

    /// Returns the embeddings `[sentences, hidden]` on every rank, each row of length 1.
    ///
    /// # Errors
    /// Fails if there are no tokens or more tokens than the model has positions, if candle fails,
    /// or if `join` fails.
    pub fn embed(&self, batch: &Batch, join: &dyn Join) -> Result<Tensor> {
        let (sentences, longest) = (batch.len(), batch.longest);
        let positions = self.positions.dim(0)?;
        ensure!(
            longest > 0 && longest <= positions,
            "a batch of {sentences} sentences of up to {longest} tokens; 1 to {positions} are \
                possible"
        );
        let ids = Tensor::from_slice(&batch.ids, (sentences * longest,), &self.device)?;
        let words = self.words.index_select(&ids, 0)?;
        let hidden = words.dim(1)?;
        let words = words.reshape((sentences, longest, hidden))?;
        let x = words.broadcast_add(&self.positions.narrow(0, 0, longest)?)?;
        let mut x = self
            .norm
            .apply(&x.reshape((sentences * longest, hidden))?)?;
        let mask = batch
            .marks(0.0, f32::MIN, &self.device)?
            .reshape((sentences, 1, 1, longest))?;
        for layer in &self.layers {
            x = layer.forward(&x, batch, &mask, join)?;
        }
        // Sum over a sentence's tokens instead of averaging: the normalization to length 1 cancels
        // the number of tokens.
        let marks = batch.marks(1.0, 0.0, &self.device)?.unsqueeze(1)?;
        let sums = marks
            .matmul(&x.reshape((sentences, longest, hidden))?)?
            .squeeze(1)?;
        let lengths = sums.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?;
        Ok(sums.broadcast_div(&lengths)?)
    }
}
