//! Compares a small model with random weights, distributed over ranks, with the whole model. The
//! ranks are threads.

use candle_core::Device;
use fusewire::{Algorithm, Options, run_threads};
use tp_encoder::measure::difference;
use tp_encoder::report::TOLERANCE;
use tp_encoder::{Batch, Config, Encoder, FusedJoin, Shard, SingleProcess, UnfusedJoin, Weights};

type Embeddings = Vec<Vec<f32>>;

fn batch() -> Batch {
    Batch::new(&[
        vec![1, 30, 12, 7, 2],
        vec![1, 2],
        vec![1, 49, 3, 3, 28, 41, 9, 2],
    ])
}

fn whole(config: &Config, weights: &Weights) -> Embeddings {
    let encoder = Encoder::new(config, weights, Shard::WHOLE, &Device::Cpu).unwrap();
    encoder
        .embed(&batch(), &SingleProcess)
        .unwrap()
        .to_vec2()
        .unwrap()
}

/// Returns the embeddings of each rank, fused and unfused. Rank r uses the weights `weights(r)`.
fn cut(
    config: &Config,
    ranks: u32,
    options: &Options,
    weights: impl Fn(u32) -> Weights + Sync,
) -> Vec<(Embeddings, Embeddings)> {
    let results = run_threads(ranks, options, |comm| {
        let shard = Shard {
            rank: comm.rank() as usize,
            size: comm.size() as usize,
        };
        let weights = weights(comm.rank());
        let encoder = Encoder::new(config, &weights, shard, &Device::Cpu).unwrap();
        let fused = encoder.embed(&batch(), &FusedJoin::new(&comm)).unwrap();
        let unfused = encoder.embed(&batch(), &UnfusedJoin::new(&comm)).unwrap();
        comm.finalize()?;
        Ok((fused.to_vec2().unwrap(), unfused.to_vec2().unwrap()))
    });
    results.into_iter().map(Result::unwrap).collect()
}

/// Returns the greatest difference from `expected` over all ranks, fused and unfused.
fn apart(expected: &Embeddings, ranks: &[(Embeddings, Embeddings)]) -> f32 {
    let differences = ranks
        .iter()
        .flat_map(|(fused, unfused)| [fused, unfused])
        .map(|embeddings| difference(expected, embeddings).unwrap());
    differences.fold(0.0, |most, next| {
        if next > most || next.is_nan() {
            next
        } else {
            most
        }
    })
}

#[test]
fn ranks_together_are_the_whole() {
    let config = Config::tiny();
    let weights = Weights::random(&config, 1).unwrap();
    let expected = whole(&config, &weights);
    for row in &expected {
        let length: f32 = row.iter().map(|value| value * value).sum();
        assert!((length - 1.0).abs() < 1e-5, "length {length}");
    }
    // Different sentences have different embeddings.
    assert!(difference(&expected[..1], &expected[2..]).unwrap() > 1e-2);
    for ranks in [1, 2, 4] {
        let results = cut(&config, ranks, &Options::default(), |_| weights.clone());
        let most = apart(&expected, &results);
        assert!(most <= TOLERANCE, "{ranks} ranks: {most:e}");
        for (rank, result) in results.iter().enumerate() {
            assert_eq!(
                result, &results[0],
                "rank {rank} of {ranks} has other bits than rank 0"
            );
        }
    }
}

#[test]
fn padding_changes_nothing() {
    let config = Config::tiny();
    let weights = Weights::random(&config, 2).unwrap();
    let expected = whole(&config, &weights);
    let encoder = Encoder::new(&config, &weights, Shard::WHOLE, &Device::Cpu).unwrap();
    let short = Batch::new(&[vec![1, 30, 12, 7, 2]]);
    let alone: Embeddings = encoder
        .embed(&short, &SingleProcess)
        .unwrap()
        .to_vec2()
        .unwrap();
    assert!(difference(&expected[..1], &alone).unwrap() <= TOLERANCE);
}

#[test]
fn every_algorithm_gives_the_same_bits() {
    let config = Config::tiny();
    let weights = Weights::random(&config, 3).unwrap();
    let fused = [Algorithm::Packet, Algorithm::Signal, Algorithm::TwoShot].map(|algorithm| {
        let mut options = Options::default();
        options.algorithm = algorithm;
        let ranks = cut(&config, 2, &options, |_| weights.clone());
        ranks.into_iter().next().unwrap().0
    });
    assert!(fused.iter().all(|embeddings| embeddings == &fused[0]));
    assert!(difference(&fused[0], &whole(&config, &weights)).unwrap() <= TOLERANCE);
}

/// Checks that wrong weights and swapped shards fail the comparison.
#[test]
fn mistakes_are_found() {
    let config = Config::tiny();
    let weights = Weights::random(&config, 4).unwrap();
    let expected = whole(&config, &weights);
    let with = |name: &str, factor: f64| {
        weights
            .clone()
            .with(name, |tensor| tensor.affine(factor, 0.0))
            .unwrap()
    };
    // One weight matrix of one rank is scaled.
    let spoiled = cut(&config, 2, &Options::default(), |rank| match rank {
        1 => with("encoder.layer.1.output.dense.weight", 1.001),
        _ => weights.clone(),
    });
    let most = apart(&expected, &spoiled);
    assert!(most > TOLERANCE, "a spoiled shard: {most:e}");
    // Simulates that both ranks add the bias of a row-parallel layer.
    for name in ["attention.output.dense", "output.dense"] {
        let name = format!("encoder.layer.0.{name}.bias");
        let twice = cut(&config, 2, &Options::default(), |_| with(&name, 2.0));
        let most = apart(&expected, &twice);
        assert!(most > TOLERANCE, "{name} twice: {most:e}");
        // Simulates that no rank adds the bias.
        let never = cut(&config, 2, &Options::default(), |_| with(&name, 0.0));
        let most = apart(&expected, &never);
        assert!(most > TOLERANCE, "no {name}: {most:e}");
    }
    // A rank computes the heads of another rank.
    let swapped = cut(&config, 2, &Options::default(), |rank| {
        let name = "encoder.layer.0.attention.self.value.weight";
        let half = config.hidden_size / 2;
        let swap = |tensor: &candle_core::Tensor| {
            let halves = [tensor.narrow(0, half, half)?, tensor.narrow(0, 0, half)?];
            candle_core::Tensor::cat(&halves, 0)
        };
        match rank {
            0 => weights.clone().with(name, swap).unwrap(),
            _ => weights.clone(),
        }
    });
    let most = apart(&expected, &swapped);
    assert!(most > TOLERANCE, "swapped heads: {most:e}");
}

#[test]
fn weights_that_do_not_fit_are_refused_by_name() {
    let config = Config::tiny();
    let weights = Weights::random(&config, 5).unwrap();
    let name = "encoder.layer.1.intermediate.dense.weight";
    let short = weights
        .clone()
        .with(name, |tensor| tensor.narrow(0, 0, 8))
        .unwrap();
    let refused = Encoder::new(&config, &short, Shard::WHOLE, &Device::Cpu).unwrap_err();
    assert!(refused.to_string().contains(name), "{refused}");
    let more = Config {
        num_hidden_layers: 3,
        ..config.clone()
    };
    let refused = Encoder::new(&more, &weights, Shard::WHOLE, &Device::Cpu).unwrap_err();
    assert!(
        refused.to_string().contains("encoder.layer.2."),
        "{refused}"
    );
    let encoder = Encoder::new(&config, &weights, Shard::WHOLE, &Device::Cpu).unwrap();
    let long = Batch::new(&[vec![1; 17]]);
    let refused = encoder.embed(&long, &SingleProcess).unwrap_err();
    assert!(refused.to_string().contains("1 to 16"), "{refused}");
    assert!(encoder.embed(&Batch::new(&[]), &SingleProcess).is_err());
}
