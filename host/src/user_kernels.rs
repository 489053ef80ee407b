//! Names of user kernels, for messages.
//!
//! A call word has 16 bits for the kernel: a hash of its name. Every launch registers its kernel,
//! so that failures and flight records of this process can name it.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use fusewire_device::call::Call;
use fusewire_device::native::{Contract, KernelInfo};

/// A kernel that this process has launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UserKernel {
    pub(crate) name: &'static str,
    pub(crate) contract: &'static Contract,
}

static KERNELS: RwLock<BTreeMap<u16, UserKernel>> = RwLock::new(BTreeMap::new());

/// Registers a kernel. Returns its code in call words.
pub(crate) fn register(info: &KernelInfo) -> u16 {
    let code = code(info.name);
    let known = KERNELS
        .read()
        .unwrap_or_else(PoisonError::into_inner)
        .get(&code)
        .is_some_and(|kernel| kernel.name == info.name);
    if !known {
        let kernel = UserKernel {
            name: info.name,
            contract: info.contract,
        };
        KERNELS
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(code, kernel);
    }
    code
}

/// Returns the kernel of a call word, if this process has launched it.
pub(crate) fn find(call: Call) -> Option<UserKernel> {
    let code = call.kernel()?;
    KERNELS
        .read()
        .unwrap_or_else(PoisonError::into_inner)
        .get(&code)
        .copied()
}

/// Returns the hash of a name, which is never 0 (FNV-1a, folded to 16 bits).
fn code(name: &str) -> u16 {
    let hash = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    match (hash >> 16 ^ hash) as u16 {
        0 => 1,
        code => code,
    }
}

/// Inserts the two values into the author's text.
pub(crate) fn fill(text: &str, a: u64, b: u64) -> String {
    text.replace("{a}", &a.to_string())
        .replace("{b}", &b.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_with_values() {
        assert_eq!(fill("expert {a} of {b}", 9, 8), "expert 9 of 8");
        assert_eq!(fill("no values", 9, 8), "no values");
    }

    #[test]
    fn codes_differ_and_are_not_zero() {
        let names = ["dispatch", "combine", "scale", "vocab_argmax", ""];
        for (i, name) in names.iter().enumerate() {
            assert_ne!(code(name), 0);
            assert!(names[..i].iter().all(|other| code(other) != code(name)));
        }
    }

    #[test]
    fn a_call_word_names_its_kernel() {
        let info = KernelInfo {
            name: "a_kernel_of_this_test",
            module: module_path!(),
            params: &[],
            native: fusewire_kernels::barrier::BARRIER.info().native,
            contract: Contract::NONE,
        };
        let call = Call::of_kernel(register(&info), 7);
        assert_eq!(find(call).map(|kernel| kernel.name), Some(info.name));
        assert!(find(Call::from_progress(call.0)).is_some());
        let other = Call::new(fusewire_device::call::Operation::AllReduce, 1, 1, 1, 0, 7);
        assert!(find(other).is_none());
    }
}
