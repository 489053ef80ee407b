//! The small floats. Conversions are written once, without branches, so that they vectorise on a
//! CPU and give the same bits everywhere; a NaN becomes the format's canonical quiet NaN.

use bytemuck::{Pod, Zeroable};

use super::{DType, Element};

macro_rules! small {
    ($(#[$doc:meta])* $name:ident, $bits:ty, $dtype:ident, $to:path, $from:path) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
        #[repr(transparent)]
        pub struct $name(pub $bits);

        impl $name {
            /// Returns the exact value; the payload of a NaN depends on the device.
            #[inline(always)]
            pub fn to_f32(self) -> f32 {
                $to(self.0)
            }

            /// Rounds to nearest, ties to even.
            #[inline(always)]
            pub fn from_f32(value: f32) -> Self {
                Self($from(value))
            }
        }

        impl super::sealed::Sealed for $name {}

        impl Element for $name {
            const DTYPE: DType = DType::$dtype;
            type Acc = f32;
            #[inline(always)]
            fn widen(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn narrow(acc: f32) -> Self {
                Self::from_f32(acc)
            }
            #[inline(always)]
            fn to_bits(self) -> u64 {
                self.0 as u64
            }
            #[inline(always)]
            fn from_bits(bits: u64) -> Self {
                Self(bits as $bits)
            }
        }
    };
}

small!(
    /// IEEE binary16.
    F16, u16, F16, widen_half, narrow_to_half
);
small!(
    /// bfloat16: the upper half of an f32.
    Bf16, u16, Bf16, bf16_to_f32, narrow_to_bf16
);
small!(
    /// fp8 E4M3FN (OCP): no infinities; values beyond 448 saturate.
    E4m3, u8, E4m3, e4m3_to_f32, narrow_to_e4m3
);
small!(
    /// fp8 E5M2 (OCP): infinities kept; finite values beyond 57344 saturate.
    E5m2, u8, E5m2, e5m2_to_f32, e5m2_from_f32
);

/// Returns the value of a binary16, by one instruction where the machine has one. The payload of a
/// NaN may differ.
#[inline(always)]
fn widen_half(half: u16) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return crate::arch::half_to_f32(half);
    #[cfg(not(target_arch = "nvptx64"))]
    half_to_f32(half)
}

/// Rounds to binary16, by one instruction where the machine has one with the same bits.
#[inline(always)]
fn narrow_to_half(value: f32) -> u16 {
    #[cfg(target_arch = "nvptx64")]
    return crate::arch::half_from_f32(value);
    #[cfg(not(target_arch = "nvptx64"))]
    half_from_f32(value)
}

/// Rounds to bfloat16, by one instruction where the machine has one with the same bits.
#[inline(always)]
fn narrow_to_bf16(value: f32) -> u16 {
    #[cfg(target_arch = "nvptx64")]
    return crate::arch::bf16_from_f32(value);
    #[cfg(not(target_arch = "nvptx64"))]
    bf16_from_f32(value)
}

/// Rounds to fp8 E4M3, by one instruction where the machine has one with the same bits.
#[inline(always)]
fn narrow_to_e4m3(value: f32) -> u8 {
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
    return crate::arch::e4m3_from_f32(value);
    #[cfg(not(all(target_arch = "nvptx64", target_feature = "sm_90")))]
    e4m3_from_f32(value)
}

#[cfg_attr(target_arch = "nvptx64", allow(dead_code))] // NVIDIA uses an instruction
#[inline(always)]
fn half_to_f32(half: u16) -> f32 {
    let bits = u32::from(half);
    let sign = (bits & 0x8000) << 16;
    // Exponent and mantissa at f32's bits, scaled by 2^112: exact, subnormals included.
    let scaled = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    let special = (bits & 0x7fff) << 13 | 0x7f80_0000;
    let quiet = if bits & 0x3ff != 0 {
        special | 0x0040_0000
    } else {
        special
    };
    let magnitude = if bits & 0x7c00 == 0x7c00 {
        quiet
    } else {
        scaled.to_bits()
    };
    f32::from_bits(magnitude | sign)
}

#[cfg_attr(target_arch = "nvptx64", allow(dead_code))] // NVIDIA uses an instruction
#[inline(always)]
fn half_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = bits >> 16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Normal results: round at bit 13 by adding half minus one plus the odd bit.
    let odd = magnitude >> 13 & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
    // Subnormal results: adding 0.5 puts the rounded mantissa into the low bits.
    let subnormal = (f32::from_bits(magnitude) + 0.5)
        .to_bits()
        .wrapping_sub(0x3f00_0000);
    let finite = if magnitude < 0x3880_0000 {
        subnormal
    } else {
        normal
    };
    let large = if magnitude > 0x7f80_0000 {
        0x7fff
    } else {
        0x7c00
    };
    let out = if magnitude >= 0x477f_f000 {
        large
    } else {
        finite
    };
    let nan = magnitude > 0x7f80_0000;
    (out | if nan { 0 } else { sign }) as u16
}

#[inline(always)]
fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg_attr(target_arch = "nvptx64", allow(dead_code))] // NVIDIA uses an instruction
#[inline(always)]
fn bf16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let nan = bits & 0x7fff_ffff > 0x7f80_0000;
    (if nan { 0x7fff } else { rounded }) as u16
}

#[inline(always)]
fn e4m3_to_f32(bits: u8) -> f32 {
    let wide = u32::from(bits);
    let sign = (wide & 0x80) << 24;
    let scaled = f32::from_bits((wide & 0x7f) << 20) * f32::from_bits(0x7b80_0000);
    let magnitude = if wide & 0x7f == 0x7f {
        0x7fc0_0000
    } else {
        scaled.to_bits()
    };
    f32::from_bits(magnitude | sign)
}

#[cfg_attr(target_feature = "sm_90", allow(dead_code))] // sm_90 uses an instruction
#[inline(always)]
fn e4m3_from_f32(value: f32) -> u8 {
    let bits = value.to_bits();
    let sign = bits >> 24 & 0x80;
    let magnitude = bits & 0x7fff_ffff;
    let odd = magnitude >> 20 & 1;
    let normal = magnitude
        .wrapping_sub(120 << 23)
        .wrapping_add(0x7_ffff + odd)
        >> 20;
    // The least subnormal is 2^-9: in 2^14 .. 2^15 an f32 counts in steps of 2^-9.
    let subnormal = (f32::from_bits(magnitude) + 16384.0)
        .to_bits()
        .wrapping_sub(0x4680_0000);
    let finite = if magnitude < 0x3c80_0000 {
        subnormal
    } else {
        normal
    };
    let saturated = if finite > 0x7e { 0x7e } else { finite };
    let large = if magnitude > 0x7f80_0000 { 0x7f } else { 0x7e };
    let out = if magnitude >= 0x43e0_0000 {
        large
    } else {
        saturated
    };
    // The sign of a computed NaN differs between devices.
    let nan = magnitude > 0x7f80_0000;
    (out | if nan { 0 } else { sign }) as u8
}

#[inline(always)]
fn e5m2_to_f32(bits: u8) -> f32 {
    widen_half(u16::from(bits) << 8)
}

#[inline(always)]
fn e5m2_from_f32(value: f32) -> u8 {
    let bits = value.to_bits();
    let sign = bits >> 24 & 0x80;
    let magnitude = bits & 0x7fff_ffff;
    let odd = magnitude >> 21 & 1;
    let normal = magnitude
        .wrapping_sub(112 << 23)
        .wrapping_add(0xf_ffff + odd)
        >> 21;
    // The least subnormal is 2^-16: in 2^7 .. 2^8 an f32 counts in steps of 2^-16.
    let subnormal = (f32::from_bits(magnitude) + 128.0)
        .to_bits()
        .wrapping_sub(0x4300_0000);
    let finite = if magnitude < 0x3880_0000 {
        subnormal
    } else {
        normal
    };
    let saturated = if finite > 0x7b { 0x7b } else { finite };
    let special = if magnitude > 0x7f80_0000 { 0x7f } else { 0x7c };
    let out = if magnitude >= 0x7f80_0000 {
        special
    } else {
        saturated
    };
    let nan = magnitude > 0x7f80_0000;
    (out | if nan { 0 } else { sign }) as u8
}
