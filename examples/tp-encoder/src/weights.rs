//! Sizes and weights of the model.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;

/// Fields of a BERT's `config.json` that the encoder needs.
#[derive(Clone, Debug, Deserialize)]
#[expect(missing_docs, reason = "the names say it; they are the file's")]
pub struct Config {
    pub hidden_size: usize,
    pub num_attention_heads: usize,
    pub num_hidden_layers: usize,
    pub intermediate_size: usize,
    pub max_position_embeddings: usize,
    pub vocab_size: usize,
    pub type_vocab_size: usize,
    pub layer_norm_eps: f64,
    pub hidden_act: String,
}

impl Config {
    /// Returns a small configuration for tests: two layers, with 4 heads of 8 elements each.
    pub fn tiny() -> Self {
        Self {
            hidden_size: 32,
            num_attention_heads: 4,
            num_hidden_layers: 2,
            intermediate_size: 64,
            max_position_embeddings: 16,
            vocab_size: 50,
            type_vocab_size: 2,
            layer_norm_eps: 1e-12,
            hidden_act: "gelu".to_owned(),
        }
    }

    /// Reads `config.json`.
    ///
    /// # Errors
    /// Fails if the file is invalid or describes a model that the encoder does not implement.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let config: Self = serde_json::from_slice(json).context("config.json")?;
        ensure!(
            config.hidden_act == "gelu",
            "config.json: activation \"{}\"; only gelu is computed here",
            config.hidden_act
        );
        ensure!(
            config.num_attention_heads > 0
                && config
                    .hidden_size
                    .is_multiple_of(config.num_attention_heads)
                && config.hidden_size.is_multiple_of(8),
            "config.json: {} elements in {} heads; a multiple of the heads, and of 8, is needed",
            config.hidden_size,
            config.num_attention_heads
        );
        Ok(config)
    }
}

/// Tensors by name, in f32 on the CPU.
#[derive(Clone, Debug)]
pub struct Weights {
    tensors: HashMap<String, Tensor>,
}

impl Weights {
    /// Reads the content of a safetensors file.
    ///
    /// # Errors
    /// Fails if the content is invalid.
    pub fn parse(safetensors: &[u8]) -> Result<Self> {
        let tensors = candle_core::safetensors::load_buffer(safetensors, &Device::Cpu)
            .context("model.safetensors")?;
        Ok(Self { tensors })
    }

    /// Returns uniform random weights for a model with the sizes in `config`, generated from
    /// `seed`. For tests.
    ///
    /// # Errors
    /// Returns errors of candle.
    pub fn random(config: &Config, seed: u64) -> Result<Self> {
        let (hidden, wide) = (config.hidden_size, config.intermediate_size);
        let mut shapes = vec![
            (
                "embeddings.word_embeddings.weight".to_owned(),
                vec![config.vocab_size, hidden],
            ),
            (
                "embeddings.position_embeddings.weight".to_owned(),
                vec![config.max_position_embeddings, hidden],
            ),
            (
                "embeddings.token_type_embeddings.weight".to_owned(),
                vec![config.type_vocab_size, hidden],
            ),
            ("embeddings.LayerNorm.weight".to_owned(), vec![hidden]),
            ("embeddings.LayerNorm.bias".to_owned(), vec![hidden]),
        ];
        for layer in 0..config.num_hidden_layers {
            let linears = [
                ("attention.self.query", hidden, hidden),
                ("attention.self.key", hidden, hidden),
                ("attention.self.value", hidden, hidden),
                ("attention.output.dense", hidden, hidden),
                ("intermediate.dense", wide, hidden),
                ("output.dense", hidden, wide),
            ];
            for (name, rows, columns) in linears {
                let name = format!("encoder.layer.{layer}.{name}");
                shapes.push((format!("{name}.weight"), vec![rows, columns]));
                shapes.push((format!("{name}.bias"), vec![rows]));
            }
            for name in ["attention.output.LayerNorm", "output.LayerNorm"] {
                for part in ["weight", "bias"] {
                    shapes.push((format!("encoder.layer.{layer}.{name}.{part}"), vec![hidden]));
                }
            }
        }
        let mut state = seed;
        let mut next = || {
            // Upper bits of Knuth's 64-bit linear congruential generator.
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1_u32 << 24) as f32 - 0.5
        };
        let mut tensors = HashMap::new();
        for (name, shape) in shapes {
            let count = shape.iter().product();
            // Weights of norms are around 1.
            let centre = if name.ends_with("LayerNorm.weight") {
                1.0
            } else {
                0.0
            };
            let values: Vec<f32> = (0..count).map(|_| centre + 0.5 * next()).collect();
            tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu)?);
        }
        Ok(Self { tensors })
    }

    /// Returns these weights with the tensor `name` replaced by the result of `change`, for tests
    /// of the comparison.
    ///
    /// # Errors
    /// Fails if there is no tensor `name`, or if `change` fails.
    pub fn with(
        mut self,
        name: &str,
        change: impl FnOnce(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let tensor = self.tensors.get(name).with_context(|| absent(name))?;
        let changed = change(tensor)?;
        self.tensors.insert(name.to_owned(), changed);
        Ok(self)
    }

    /// Returns the tensor `name`. Fails if its shape is not `shape`.
    pub(crate) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let tensor = self.tensors.get(name).with_context(|| absent(name))?;
        ensure!(
            tensor.dims() == shape && tensor.dtype() == DType::F32,
            "weight {name}: {:?} of {:?}; {shape:?} of F32 is needed",
            tensor.dims(),
            tensor.dtype()
        );
        Ok(tensor.clone())
    }
}

fn absent(name: &str) -> String {
    format!(
        "the weights have no {name}; is this a BERT without a prefix, such as all-MiniLM-L6-v2?"
    )
}
