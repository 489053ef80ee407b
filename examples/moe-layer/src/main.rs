//! A transformer's mixture-of-experts layer, expert-parallel: each rank has some of the tokens and
//! some of the experts. A router selects the experts of each token, [`fusewire::Moe`] dispatches
//! the tokens to the ranks of their experts, the experts compute SwiGLU, and `Moe` combines their
//! results.
//!
//! ```text
//! cargo run --release --bin moe-layer -- --ranks 4
//! ```
//!
//! Compares every element with a computation of the same layer on one thread without Fusewire, bit
//! by bit, and prints the times. Exits with status 1 if any element differs, and with status 2 if
//! the arguments are invalid.

mod arithmetic;
mod clock;
mod experts;
mod layer;
mod model;
mod router;
mod run;

use core::time::Duration;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use half::bf16;

use crate::arithmetic::Random;
use crate::model::{Model, Shape};
use crate::run::{Case, Difference, MODES, Mode, Outcome, Run, experts_of};

/// Seed of the weights and of the tokens.
const SEED: u64 = 1;

/// Number of inputs.
const CASES: usize = 4;

#[derive(Debug, Parser)]
#[command(
    about = "A mixture-of-experts layer, expert-parallel",
    args_override_self = true
)]
struct Arguments {
    /// Number of ranks (threads of this process)
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    #[command(flatten)]
    shape: Shape,
    /// Runs of the layer in each mode
    #[arg(long, default_value_t = 9)]
    iterations: usize,
    /// Changes one weight on this rank; the comparison must then fail
    #[arg(long, value_name = "RANK")]
    inject: Option<u32>,
}

impl Arguments {
    fn are_valid(&self) -> bool {
        let (ranks, s) = (self.ranks, self.shape);
        let sizes = [s.tokens, s.hidden, s.intermediate, self.iterations];
        let has_expert = |rank| !experts_of(rank, ranks, s.experts).is_empty();
        ranks > 0
            && !sizes.contains(&0)
            && s.hidden.is_multiple_of(8)
            && (1..=s.experts.min(16)).contains(&s.top_k)
            && self.inject.is_none_or(has_expert)
    }
}

/// Returns random tokens and their results.
fn random_case(shape: Shape, model: &Model, random: &mut Random) -> Case {
    let elements = random.numbers(shape.tokens * shape.hidden, 1.0);
    let in_bf16 = elements.into_iter().map(|x| bf16::from_f32(x).to_f32());
    let tokens: Vec<f32> = in_bf16.collect();
    let results = tokens
        .chunks(shape.hidden)
        .map(|token| model.reference(token));
    let expected = results.collect::<Vec<_>>().concat();
    Case { tokens, expected }
}

fn milliseconds(time: Duration) -> String {
    format!("{:9.3}", time.as_secs_f64() * 1e3)
}

fn print_row(ranks: u32, tokens: usize, (name, _, _): Mode, outcome: &Outcome) {
    let (total, parts) = (outcome.times.total, outcome.times.parts.map(milliseconds));
    let per_second = tokens as f64 / total.as_secs_f64();
    let (parts, total) = (parts.join(" "), milliseconds(total));
    println!("{ranks:5}  {name:<17} {parts} {total} {per_second:9.0}");
}

fn print_difference(it: Difference, hidden: usize, cases: &[Case]) {
    let (token, element) = (it.index / hidden, it.index % hidden);
    let expected = cases[it.iteration % CASES].expected[it.index];
    let [found, expected] = [it.found, expected].map(bf16::from_bits);
    eprintln!(
        "iteration {}: token {token}, element {element} is {found}; the reference has {expected}",
        it.iteration
    );
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if !arguments.are_valid() {
        eprintln!(
            "moe-layer: all numbers must be at least 1, --hidden a multiple of 8, --top-k at most \
             16 and at most --experts, and --inject a rank that has an expert"
        );
        return ExitCode::from(2);
    }
    let (shape, mut random) = (arguments.shape, Random::new(SEED));
    println!(
        "{shape}\nweights and tokens are random numbers from seed {SEED}, not a trained model"
    );
    let model = Model::new(shape, &mut random);
    let start = Instant::now();
    let cases: Vec<Case> = (0..CASES)
        .map(|_| random_case(shape, &model, &mut random))
        .collect();
    let time = start.elapsed().as_secs_f64() * 1e3 / CASES as f64;
    println!("reference on one thread: {time:.3} ms for each of {CASES} inputs\n");
    println!("ranks  mode            router ms  dispatch   experts   combine     total  tokens/s");
    let mut all_equal = true;
    let single = (arguments.ranks > 1).then_some(1);
    for ranks in single.into_iter().chain([arguments.ranks]) {
        let run = Run {
            shape,
            model: &model,
            cases: &cases,
            iterations: arguments.iterations,
            spoiled: arguments.inject.filter(|_| ranks == arguments.ranks),
        };
        let outcomes = match run.on_ranks(ranks) {
            Ok(outcomes) => outcomes,
            Err(error) => {
                eprintln!("moe-layer: {ranks} ranks: {error}");
                return ExitCode::FAILURE;
            }
        };
        for (mode, outcome) in MODES.into_iter().zip(&outcomes) {
            print_row(ranks, shape.tokens, mode, outcome);
            if let Some(difference) = outcome.difference {
                eprint!("moe-layer: {ranks} ranks, {}: ", mode.0);
                print_difference(difference, shape.hidden, &cases);
                all_equal = false;
            }
        }
    }
    if !all_equal {
        return ExitCode::FAILURE;
    }
    let iterations = arguments.iterations;
    println!(
        "\nall results of {iterations} iterations in each mode equal the reference bit by bit"
    );
    ExitCode::SUCCESS
}
