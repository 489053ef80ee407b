//! Exponential and logarithm against f64: over a sweep of all f32, around every edge, and their
//! special values.

use fusewire_device::math::{exp, log};

/// A stride through all bit patterns that is coprime to every power of two. `FUSEWIRE_TEST_MATH=1`
/// takes them all, in minutes.
fn stride() -> usize {
    match std::env::var("FUSEWIRE_TEST_MATH") {
        Ok(stride) => stride.parse().expect("FUSEWIRE_TEST_MATH is a stride"),
        Err(_) => 397,
    }
}

/// All patterns by the stride, and every value adjacent to the edges of a range.
fn samples() -> impl Iterator<Item = f32> {
    let sweep = (0..=u32::MAX).step_by(stride()).map(f32::from_bits);
    let ln2 = core::f32::consts::LN_2;
    let edges = [
        0.0,
        f32::MIN_POSITIVE,
        f32::MAX,
        f32::INFINITY,
        1.0,
        core::f32::consts::SQRT_2,
        core::f32::consts::FRAC_1_SQRT_2,
        88.722_84,
        89.0,
        103.972_08,
        104.0,
        87.336_54,
        ln2 / 2.0,
        ln2 * 1.5,
        ln2 * 64.5,
    ];
    let near = edges.into_iter().flat_map(|edge: f32| {
        (-3000i32..3000).flat_map(move |step| {
            let bits = edge.to_bits().wrapping_add_signed(step);
            [f32::from_bits(bits), -f32::from_bits(bits)]
        })
    });
    sweep.chain(near)
}

/// Returns the distance between the two f32 values adjacent to `exact`.
fn ulp(exact: f64) -> f64 {
    let exponent = (exact.abs().to_bits() >> 52) as i32 - 1023;
    2f64.powi(exponent.max(-126) - 23)
}

/// Greatest error in ulp, and where.
fn worst(ours: impl Fn(f32) -> f32, theirs: impl Fn(f64) -> f64) -> (f64, f32) {
    let mut worst = (0.0, 0.0);
    for x in samples() {
        let (found, exact) = (ours(x), theirs(f64::from(x)));
        if exact.is_nan() {
            assert!(found.is_nan(), "of {x:e}: {found:e}");
            continue;
        }
        // Rounded to f32, what is infinite must be, and nothing else.
        let rounded = exact as f32;
        if rounded.is_infinite() || found.is_infinite() {
            assert_eq!(found, rounded, "of {x:e}");
            continue;
        }
        let error = (f64::from(found) - exact).abs() / ulp(exact);
        if error > worst.0 || error.is_nan() {
            worst = (error, x);
        }
    }
    worst
}

#[test]
fn exp_is_near() {
    let (error, at) = worst(exp, f64::exp);
    println!("exp: {error} ulp at {at:e}");
    assert!(error < 1.0, "{error} ulp at {at:e}");
}

#[test]
fn log_is_near() {
    let (error, at) = worst(log, f64::ln);
    println!("log: {error} ulp at {at:e}");
    assert!(error < 0.9, "{error} ulp at {at:e}");
}

#[test]
fn special_values() {
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(-0.0), 1.0);
    assert_eq!(exp(f32::INFINITY), f32::INFINITY);
    assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
    assert_eq!(exp(89.5), f32::INFINITY);
    assert_eq!(exp(-1000.0).to_bits(), 0);
    assert!(exp(f32::NAN).is_nan() && exp(-f32::NAN).is_nan());
    // Subnormal: 2^-149.
    assert_eq!(exp(-103.2).to_bits(), 1);
    assert_eq!(log(1.0).to_bits(), 0);
    assert_eq!(log(0.0), f32::NEG_INFINITY);
    assert_eq!(log(-0.0), f32::NEG_INFINITY);
    assert_eq!(log(f32::INFINITY), f32::INFINITY);
    assert!(log(-1.0).is_nan() && log(f32::NEG_INFINITY).is_nan() && log(f32::NAN).is_nan());
    assert!(log(-f32::from_bits(1)).is_nan());
}

/// The bits that every machine must give, and a control that such a comparison distinguishes two
/// functions.
#[test]
fn bits() {
    let hash = |f: fn(f32) -> f32| {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for bits in (0..=u32::MAX).step_by(10_007) {
            let y = f(f32::from_bits(bits));
            let bits = if y.is_nan() { 0x7fc0_0000 } else { y.to_bits() };
            hash = (hash ^ u64::from(bits)).wrapping_mul(0x100_0000_01b3);
        }
        hash
    };
    assert_eq!(hash(exp), 18_319_259_969_403_982_302);
    assert_eq!(hash(log), 13_632_500_707_399_338_340);
    assert_ne!(hash(exp), hash(f32::exp));
}
