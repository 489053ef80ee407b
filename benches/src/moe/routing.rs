//! The experts, elements and weights of the tokens, which `c/mpi_moe.c` computes in the same way.

use clap::Args;
use fusewire::Bf16;

/// Experts that tokens select, and how the tokens get there.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Routing {
    /// Experts of all ranks.
    #[arg(long, default_value_t = 64)]
    pub(super) experts: u32,
    /// Experts of a token.
    #[arg(long, default_value_t = 8)]
    pub(super) top_k: u32,
    /// Sends 80 % of the selections to the first eighth of the experts.
    #[arg(long)]
    pub(super) skewed: bool,
    /// Tokens of a rank in a round of high throughput mode. 0 selects low latency mode.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub(super) staging: usize,
}

/// Random numbers of an xorshift generator.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

impl Routing {
    /// Returns the distribution and the mode, for headers.
    pub(super) fn name(&self) -> String {
        let routing = if self.skewed { "skewed" } else { "uniform" };
        match self.staging {
            0 => format!("{routing} routing"),
            staging => format!("{routing} routing, high throughput mode with staging {staging}"),
        }
    }

    /// Returns the uniform routing of tokens to `top_k` of `experts` experts.
    pub(crate) const fn uniform(experts: u32, top_k: u32) -> Self {
        Self {
            experts,
            top_k,
            skewed: false,
            staging: 0,
        }
    }

    /// Returns the experts of all ranks.
    pub(crate) const fn experts(&self) -> u32 {
        self.experts
    }

    /// Returns the number of experts of a token.
    pub(crate) const fn top_k(&self) -> u32 {
        self.top_k
    }

    /// Returns the experts of the tokens of `rank`, without repetition in a token.
    pub(crate) fn experts_of(&self, tokens: usize, rank: u32) -> Vec<i32> {
        let mut random = Random((u64::from(rank) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let all = u64::from(self.experts);
        let mut ids = Vec::new();
        for _ in 0..tokens {
            let mut chosen: Vec<i32> = Vec::new();
            while chosen.len() < self.top_k as usize {
                let is_favored = self.skewed && random.below(10) < 8;
                let bound = if is_favored { (all / 8).max(1) } else { all };
                let id = random.below(bound) as i32;
                let id = match chosen.contains(&id) {
                    true => random.below(all) as i32,
                    false => id,
                };
                if !chosen.contains(&id) {
                    chosen.push(id);
                }
            }
            ids.extend(chosen);
        }
        ids
    }

    /// Returns the number of experts of a rank.
    pub(super) fn each(&self, ranks: u32) -> i32 {
        self.experts.div_ceil(ranks) as i32
    }

    /// Returns the expected number of ranks to which a token is sent, with uniform routing:
    /// `R (1 - C(E - E/R, k) / C(E, k))`. Only for numbers of ranks that divide the experts.
    pub(super) fn expected_ranks(&self, ranks: u32) -> f64 {
        let (all, elsewhere) = (self.experts, self.experts - self.experts / ranks);
        let missed = (0..self.top_k).map(|k| {
            let remaining = f64::from(elsewhere) - f64::from(k);
            remaining.max(0.0) / (f64::from(all) - f64::from(k))
        });
        f64::from(ranks) * (1.0 - missed.product::<f64>())
    }
}

fn hash(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// Returns a multiple of 1/64 from -127/64 to 127/64, which bf16 represents.
fn value_of(seed: u32) -> Bf16 {
    Bf16::from_f32((hash(seed) % 255).wrapping_sub(127).cast_signed() as f32 / 64.0)
}

fn token_seed(rank: u32, token: u32) -> u32 {
    hash(rank << 20 | token)
}

fn values(seed: u32, hidden: usize) -> impl Iterator<Item = Bf16> {
    (0..hidden as u32).map(move |channel| value_of(seed.wrapping_add(channel)))
}

/// Returns the elements of a token.
pub(super) fn elements_of(rank: u32, token: u32, hidden: usize) -> impl Iterator<Item = Bf16> {
    values(token_seed(rank, token), hidden)
}

/// Returns the result of an expert for a token.
pub(super) fn result_of(
    rank: u32,
    token: u32,
    expert: u32,
    hidden: usize,
) -> impl Iterator<Item = Bf16> {
    values(hash(token_seed(rank, token) ^ (expert + 1)), hidden)
}

/// Returns the weight of a selection. Products and sums with it are rounded, so the sum depends on
/// its order.
pub(super) fn weight_of(token: usize, selection: usize) -> f32 {
    1.0 / (2 + (token + selection) % 7) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_ranks_are_those_of_deepseek() {
        let table = [
            (8, 5.29),
            (16, 6.52),
            (32, 7.27),
            (64, 7.68),
            (128, 7.89),
            (256, 8.0),
        ];
        for (ranks, expected) in table {
            let found = Routing::uniform(256, 8).expected_ranks(ranks);
            assert!((found - expected).abs() < 0.006, "{ranks}: {found}");
        }
        assert!((Routing::uniform(8, 8).expected_ranks(2) - 2.0).abs() < 1e-12);
    }

    #[test]
    fn the_generator_is_uniform() {
        let (routing, tokens, ranks) = (Routing::uniform(256, 8), 4096, 8);
        let mut copies = 0;
        for rank in 0..ranks {
            for ids in routing.experts_of(tokens, rank).chunks(8) {
                let mut of_token: Vec<_> = ids.iter().map(|id| id / routing.each(ranks)).collect();
                of_token.sort_unstable();
                of_token.dedup();
                copies += of_token.len();
            }
        }
        let per_token = copies as f64 / (tokens * ranks as usize) as f64;
        let expected = routing.expected_ranks(ranks);
        assert!(
            (per_token - expected).abs() < 0.02,
            "{per_token}, {expected}"
        );
    }
}
