//! Tensors, values and operators.
mod common;
use common::{alone, Folder};
use distgrad::{
    load_safetensors_into, op, op_unchecked, ops, save_safetensors, values, Code, DlpackTensor,
    Dtype, EnableGrad, NoGrad, Tensor, Value, OPERATORS, OPERATORS_IN_PLACE,
};
use std::{
    env,
    ffi::c_void,
    process::Command,
    sync::{
        atomic::{AtomicUsize, Ordering},
        Arc,
    },
};

fn floats(data: &[f32], shape: &[i64]) -> Tensor {
    Tensor::from_slice(data, shape).unwrap()
}

#[test]
fn elements_go_in_and_out() {
    let x = floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]);
    assert_eq!((x.shape(), x.strides()), (vec![2, 3], vec![3, 1]));
    assert_eq!((x.dtype(), x.device(), x.element_count()), (Dtype::FLOAT32, "cpu", 6));
    assert_eq!(format!("{x:?}"), "Tensor(float32 [2, 3] on cpu)");
    // Row-major, whatever lies in memory.
    let turned = x.transpose(0, 1).unwrap();
    assert_eq!(turned.strides(), [1, 3]);
    assert_eq!(turned.to_vec::<f32>().unwrap(), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    assert_eq!(x.select(0, 1).unwrap().to_vec::<f32>().unwrap(), [4.0, 5.0, 6.0]);
    assert_eq!(Tensor::from_scalar(7i64).unwrap().item::<i64>().unwrap(), 7);
    assert!(Tensor::from_slice::<u8>(&[], &[0, 5]).unwrap().to_vec::<u8>().unwrap().is_empty());
}

// Whatever the strides: torch calls such a tensor contiguous.
#[test]
fn no_elements_are_none_in_any_order() -> distgrad::Result<()> {
    let none = Tensor::zeros(&[2, 0, 3], Dtype::FLOAT32)?.permute(&[2, 1, 0])?;
    assert_eq!(none.to_vec::<f32>()?, [0f32; 0]);
    let wide = Tensor::zeros(&[1, 0], Dtype::FLOAT32)?.expand(&[3, 0])?;
    assert_eq!(wide.to_vec::<f32>()?, [0f32; 0]);
    assert_eq!(wide.to_vec::<f64>().unwrap_err().code(), Code::InvalidArgument);
    Ok(())
}

#[test]
fn wrong_elements_are_errors() {
    for shape in [&[2, 2][..], &[-1, -3], &[i64::MAX, 3], &[0]] {
        let error = Tensor::from_slice(&[1.0f32, 2.0, 3.0], shape).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{shape:?}");
    }
    let x = floats(&[1.0, 2.0], &[2]);
    assert_eq!(x.to_vec::<f64>().unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(x.item::<f32>().unwrap_err().code(), Code::InvalidArgument);
    let sparse = op("aten::to_sparse", &values![&x]).unwrap();
    assert!(sparse.to_vec::<f32>().is_err());
    // SAFETY: nothing writes here.
    let turned = unsafe {
        floats(&[1.0; 6], &[2, 3]).transpose(0, 1).unwrap().as_slice::<f32>().map(<[_]>::len)
    };
    assert_eq!(turned.unwrap_err().code(), Code::FailedPrecondition);
}

/// Handles are of the whole process, where other tests make some too: so this is another one.
#[test]
#[ignore = "is run by the test below"]
fn child_that_counts_handles() {
    #[repr(C)]
    struct Text {
        data: *const u8,
        size: usize,
    }
    extern "C" {
        fn dg_error_create_with_origin(c: i32, text: Text, origin: u32, rank: u32) -> *mut c_void;
        fn dg_error_destroy(error: *mut c_void);
    }
    // They take the same place one after the other, and number it anew.
    let next = || {
        // SAFETY: it is destroyed once, and a text of no bytes needs none.
        unsafe {
            let text = Text { data: std::ptr::null(), size: 0 };
            let error = dg_error_create_with_origin(5, text, 0, 0);
            dg_error_destroy(error);
            error as usize
        }
    };
    let x = floats(&[1.0; 6], &[2, 3]);
    let (first, second) = (next(), next());
    assert_eq!((x.shape(), x.strides()), (vec![2, 3], vec![3, 1]));
    // SAFETY: nothing writes here.
    assert_eq!(unsafe { x.as_slice::<f32>() }.unwrap().len(), 6);
    assert_eq!(next() - second, second - first);
}

// Where there is none left, a tensor would be one of another layout.
#[test]
fn a_layout_takes_no_handle() {
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "child_that_counts_handles", "--ignored"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn a_vector_is_neither_copied_nor_lost() {
    let data = vec![1.0f32, 2.0, 3.0];
    let address = data.as_ptr();
    let x = Tensor::from_vec(data, &[3]).unwrap();
    let alias = x.narrow(0, 1, 2).unwrap();
    // SAFETY: nothing writes here.
    assert_eq!(unsafe { x.as_slice::<f32>() }.unwrap().as_ptr(), address);
    drop(x);
    assert_eq!(alias.to_vec::<f32>().unwrap(), [2.0, 3.0]);
}

#[test]
fn torchs_own_tensors_are_shared() {
    let x = floats(&[1.0, 2.0], &[2]).require_grad().unwrap();
    let y = x.square().unwrap();
    // SAFETY: it is the library's own, and alive.
    let same = unsafe { Tensor::from_torch_ptr(y.as_torch_ptr()) }.unwrap();
    assert_ne!(same.as_torch_ptr(), y.as_torch_ptr()); // a reference of its own
    drop(y);
    assert!(same.requires_grad());
    assert_eq!(same.to_vec::<f32>().unwrap(), [1.0, 4.0]);
}

#[test]
fn dlpack_shares_memory() {
    let x = floats(&[1.0, 2.0, 3.0], &[3]);
    let y = Tensor::from_dlpack(x.to_dlpack().unwrap()).unwrap();
    // SAFETY: no other thread has it.
    unsafe { x.zero_() }.unwrap();
    assert_eq!(y.to_vec::<f32>().unwrap(), [0.0; 3]);
    // What nobody imports is dropped.
    drop(x.to_dlpack().unwrap());
    let leaf = floats(&[1.0], &[1]).require_grad().unwrap();
    assert_eq!(leaf.to_dlpack().err().unwrap().code(), Code::FailedPrecondition);
}

// A backward takes what the graph has saved for places in memory.
#[test]
fn dlpack_hides_no_writes_from_autograd() -> distgrad::Result<()> {
    let x = Tensor::randn(&[1, 1, 4, 4])?.require_grad()?;
    let pooled = ops("aten::max_pool2d_with_indices", &values![&x, [2, 2]])?;
    let [Value::Tensor(largest), Value::Tensor(places)] = &pooled[..] else {
        panic!("{pooled:?}");
    };
    let loss = largest.sum()?;
    let same = Tensor::from_dlpack(places.to_dlpack()?)?;
    let folder = Folder::new();
    let file = folder.0.join("places.safetensors");
    // Others, in range: what is out of range would be written to.
    save_safetensors(&file, [("places", &places.flip(&[3])?)], [("", ""); 0])?;
    load_safetensors_into(&file, [("places", &same)])?;
    assert_eq!(places.to_vec::<i64>()?, same.to_vec::<i64>()?);
    let worker = alone();
    let error = worker.context()?.backward([&loss]).unwrap_err();
    assert!(error.message().contains("modified by an inplace operation"), "{error}");
    Ok(())
}

/// `DLManagedTensorVersioned`, as another library would have it.
#[repr(C)]
struct Managed {
    version: [u32; 2],
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
    flags: u64,
    data: *mut c_void,
    device: [i32; 2],
    ndim: i32,
    dtype: [u8; 4],
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

struct Foreign {
    managed: Managed,
    data: [f32; 2],
    shape: [i64; 1],
    ended: Arc<AtomicUsize>,
}

fn foreign(ended: &Arc<AtomicUsize>, major: u32, flags: u64) -> DlpackTensor {
    unsafe extern "C" fn end(managed: *mut Managed) {
        // SAFETY: the context is the box that was leaked below.
        let foreign = unsafe { Box::from_raw((*managed).manager_ctx.cast::<Foreign>()) };
        foreign.ended.fetch_add(1, Ordering::SeqCst);
    }
    let managed = Managed {
        version: [major, 0],
        manager_ctx: std::ptr::null_mut(),
        deleter: Some(end),
        flags,
        data: std::ptr::null_mut(),
        device: [1, 0],
        ndim: 1,
        dtype: [2, 32, 1, 0],
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let boxed = Foreign { managed, data: [5.0, 6.0], shape: [2], ended: Arc::clone(ended) };
    let foreign = Box::into_raw(Box::new(boxed));
    // SAFETY: it was just leaked, and is a DLManagedTensorVersioned with all that it points to.
    unsafe {
        (*foreign).managed.manager_ctx = foreign.cast();
        (*foreign).managed.data = (&raw mut (*foreign).data).cast();
        (*foreign).managed.shape = (&raw mut (*foreign).shape).cast();
        DlpackTensor::from_raw((&raw mut (*foreign).managed).cast())
    }
}

#[test]
fn dlpack_of_others_is_ended_once() {
    let ended = Arc::new(AtomicUsize::new(0));
    let x = Tensor::from_dlpack(foreign(&ended, 1, 0)).unwrap();
    assert_eq!(x.to_vec::<f32>().unwrap(), [5.0, 6.0]);
    assert_eq!(ended.load(Ordering::SeqCst), 0);
    drop(x);
    assert_eq!(ended.load(Ordering::SeqCst), 1);
    // Taken means taken, also when it fails; and what is not given away is ended here.
    assert_eq!(Tensor::from_dlpack(foreign(&ended, 2, 0)).unwrap_err().code(), Code::Unimplemented);
    let read_only = Tensor::from_dlpack(foreign(&ended, 1, 1)).unwrap_err();
    assert_eq!(read_only.code(), Code::FailedPrecondition);
    drop(foreign(&ended, 1, 0));
    assert_eq!(ended.load(Ordering::SeqCst), 4);
}

#[test]
fn operators_by_name() {
    let x = floats(&[3.0, 1.0, 2.0], &[3]);
    let sorted = ops("aten::sort", &values![&x, -1, true]).unwrap();
    let [Value::Tensor(elements), Value::Tensor(places)] = &sorted[..] else {
        panic!("{sorted:?}");
    };
    assert_eq!(elements.to_vec::<f32>().unwrap(), [3.0, 2.0, 1.0]);
    assert_eq!(places.to_vec::<i64>().unwrap(), [0, 2, 1]);

    let parts = ops("aten::split.Tensor", &values![&x, 2]).unwrap().remove(0);
    let parts = Vec::<Tensor>::try_from(parts).unwrap();
    assert_eq!(parts[1].to_vec::<f32>().unwrap(), [2.0]);
    assert!(bool::try_from(ops("aten::equal", &values![&x, &x]).unwrap().remove(0)).unwrap());
    let size = i64::try_from(ops("aten::size.int", &values![&x, 0]).unwrap().remove(0));
    assert_eq!(size.unwrap(), 3);

    assert_eq!(op("aten::no_such", &[]).unwrap_err().code(), Code::NotFound);
    assert_eq!(op("aten::mm", &values![&x]).unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(op("aten::mm", &values![&x, "text"]).unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(op("aten::equal", &values![&x, &x]).unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(i64::try_from(Value::from(1.5)).unwrap_err().code(), Code::InvalidArgument);
}

// It would change what clones on other threads refer to, in the middle of what those do.
#[test]
fn to_require_grad_changes_no_clone() {
    let x = floats(&[1.0], &[1]);
    let clone = x.clone();
    let leaf = x.require_grad().unwrap();
    assert!(leaf.requires_grad() && !clone.requires_grad());
    let again = leaf.clone().require_grad().unwrap();
    assert!(again.requires_grad() && leaf.requires_grad());
    // SAFETY: nobody else uses it.
    unsafe { clone.fill_(7.0) }.unwrap();
    assert_eq!(leaf.to_vec::<f32>().unwrap(), [7.0], "the memory is the same");
    let computed = leaf.relu().unwrap();
    assert_eq!(computed.require_grad().unwrap_err().code(), Code::FailedPrecondition);
}

#[test]
fn safe_code_runs_what_only_computes() {
    let x = floats(&[1.0], &[1]);
    let far = values![&x, [1i64 << 20], [1]];
    for name in [
        "inductor::_reinterpret_tensor",
        "aten::set_.source_Tensor",
        // Public ones that do not look at how their arguments fit together.
        "aten::native_batch_norm",
        "aten::_foreach_copy",
        // Nor at indices.
        "aten::max_pool2d_with_indices_backward",
        "aten::ctc_loss.IntList",
        // Whose results harm others.
        "aten::sparse_coo_tensor.indices_size",
        "aten::sparse_csr_tensor.crow_col_value_size",
        // Whose results hide what is written to them from a backward.
        "aten::data",
        "aten::unsafe_split.Tensor",
        "aten::sparse_coo_tensor.indices",
    ] {
        assert_eq!(op(name, &far).unwrap_err().code(), Code::PermissionDenied, "{name}");
        assert_eq!(ops(name, &far).unwrap_err().code(), Code::PermissionDenied, "{name}");
    }
    assert_eq!(ops("aten::relu_", &values![&x]).unwrap_err().code(), Code::PermissionDenied);
    // It writes to the running statistics, though its schema does not say so.
    assert_eq!(op("aten::batch_norm", &values![&x]).unwrap_err().code(), Code::PermissionDenied);
    let weighted = values![&x, 1, (), &x];
    assert_eq!(op("aten::cov", &weighted).unwrap_err().code(), Code::PermissionDenied);
    // SAFETY: nothing reads beyond its memory, as is seen here.
    let beyond = unsafe { op_unchecked("inductor::_reinterpret_tensor", &far) }.unwrap();
    assert_eq!(beyond.shape(), [1 << 20]);
    // SAFETY: nobody writes to it.
    let error = unsafe { beyond.as_slice::<f32>() }.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
}

#[test]
fn nested_tensors_have_no_elements_to_see() {
    let parts: &[Tensor] = &[floats(&[1.0, 2.0], &[1, 2]), floats(&[0.0; 4], &[2, 2])];
    // SAFETY: it copies its arguments.
    let nested =
        unsafe { op_unchecked("aten::_nested_tensor_from_tensor_list", &values![parts]) }.unwrap();
    assert_eq!(nested.shape(), [2, -1, 2]);
    assert!(nested.strides().is_empty());
    assert_eq!(nested.to_vec::<f32>().unwrap_err().code(), Code::FailedPrecondition);
}

#[test]
fn every_kind_of_value() {
    let x = floats(&[1.0, 2.0, 3.0, 4.0], &[2, 2]);
    let none: Option<&Tensor> = None;
    let linear = op("aten::linear", &values![&x, &x, none]).unwrap();
    assert_eq!(linear.to_vec::<f32>().unwrap(), [5.0, 11.0, 11.0, 25.0]);
    assert_eq!(op("aten::flip", &values![&x, [0, 1]]).unwrap().to_vec::<f32>().unwrap()[0], 4.0);
    let full = op("aten::full", &values![[2], 1.5, Dtype::FLOAT64, (), "cpu", false]).unwrap();
    assert_eq!(full.to_vec::<f64>().unwrap(), [1.5, 1.5]);
    let cat = op("aten::cat", &values![[&x, &x], 1]).unwrap();
    assert_eq!(cat.shape(), [2, 4]);
    let complex = op("aten::full", &[[1i64].into(), Value::Complex(0.0, 2.0)]).unwrap();
    assert_eq!(complex.dtype(), Dtype::COMPLEX64);
    let number =
        ops("aten::item", &values![&op("aten::sum", &values![&complex]).unwrap()]).unwrap();
    assert!(
        matches!(number[..], [Value::Complex(real, imaginary)] if (real, imaginary) == (0.0, 2.0))
    );
    // A list of optional tensors with a gap: all rows, column 1.
    let column = Tensor::from_slice(&[1i64], &[1]).unwrap();
    let index: &[Option<Tensor>] = &[None, Some(column)];
    let picked = op("aten::index.Tensor", &values![&x, index]).unwrap();
    assert_eq!(picked.to_vec::<f32>().unwrap(), [2.0, 4.0]);
    let reals = [2.0, 2.0];
    let image = x.reshape(&[1, 1, 2, 2]).unwrap();
    let sizes: Option<&Tensor> = None;
    let larger = op("aten::upsample_nearest2d.vec", &values![&image, sizes, reals]).unwrap();
    assert_eq!(larger.shape(), [1, 1, 4, 4]);
}

#[test]
fn typed_operators() -> distgrad::Result<()> {
    // A name that is wrong gives NotFound, arguments that are missing InvalidArgument.
    for name in OPERATORS {
        assert_eq!(op(name, &[]).unwrap_err().code(), Code::InvalidArgument, "{name}");
    }
    for name in OPERATORS_IN_PLACE {
        assert_eq!(op(name, &[]).unwrap_err().code(), Code::PermissionDenied, "{name}");
    }
    let x = floats(&[-1.0, 2.0, 3.0, -4.0], &[2, 2]);
    let labels = Tensor::from_slice(&[1i64, 0], &[2]).unwrap();
    let image = Tensor::ones(&[1, 1, 4, 4], Dtype::FLOAT32).unwrap();
    let cube = Tensor::ones(&[2, 2, 2], Dtype::FLOAT32).unwrap();
    let kernel = Tensor::ones(&[2, 1, 3, 3], Dtype::FLOAT32).unwrap();
    // Each with arguments: those that do not fit the schema fail here.
    let results = [
        x.add(&x),
        x.add_scalar(1.5),
        x.sub(&x),
        x.sub_scalar(2.0),
        x.mul(&x),
        x.mul_scalar(2.0),
        x.div(&x),
        x.div_scalar(2.0),
        x.pow(2.0),
        x.neg(),
        x.abs(),
        x.exp(),
        x.log(),
        x.sqrt(),
        x.square(),
        x.relu(),
        x.gelu(),
        x.sigmoid(),
        x.tanh(),
        x.softmax(1),
        x.log_softmax(1),
        x.clamp(-1.0, 1.0),
        x.sin(),
        x.cos(),
        x.silu(),
        x.leaky_relu(0.1),
        x.maximum(&x),
        x.minimum(&x),
        x.masked_fill(&x.gt(&x)?, 1.0),
        x.lt(&x),
        cube.bmm(&cube),
        image.adaptive_avg_pool2d([2, 2]),
        x.embedding(&labels),
        image.scaled_dot_product_attention(&image, &image),
        x.gather(0, &labels.unsqueeze(0)?),
        x.norm(),
        x.cumsum(0),
        x.logsumexp(&[0], true),
        x.l1_loss(&x),
        x.binary_cross_entropy_with_logits(&x),
        x.view(&[4]),
        x.unsqueeze(0)?.expand(&[3, 2, 2]),
        x.permute(&[1, 0]),
        x.flip(&[0]),
        x.tril(),
        unsafe { x.copy()?.fill_(1.0) },
        unsafe { x.copy()?.mul_(2.0) },
        unsafe { x.copy()?.uniform_(0.0, 1.0) },
        unsafe { x.copy()?.normal_(0.0, 1.0) },
        Tensor::full(&[2], 1.5, Dtype::FLOAT64),
        Tensor::arange(3),
        Tensor::rand(&[2]),
        Tensor::choose(&x.lt(&x)?, &x, &x),
        x.matmul(&x),
        x.linear(&x, None),
        x.linear(&x, Some(&x)),
        image.conv2d(&kernel, None, [1, 1], [1, 1]),
        image.max_pool2d([2, 2]),
        x.index_select(0, &labels),
        x.layer_norm(&[2], None, None),
        x.dropout(0.5, true),
        x.sum(),
        x.sum_dims(&[1], true),
        x.mean(),
        x.mean_dims(&[0], false),
        x.max(),
        x.min(),
        x.argmax(1),
        x.cross_entropy_loss(&labels),
        x.nll_loss(&labels),
        x.mse_loss(&x),
        x.eq(&x),
        x.reshape(&[4]),
        x.flatten(0, -1),
        x.transpose(0, 1),
        x.unsqueeze(0),
        x.squeeze(0),
        x.narrow(0, 0, 1),
        x.select(0, 0),
        x.to_dtype(Dtype::FLOAT64),
        x.contiguous(),
        x.copy(),
        x.zeros_like(),
        unsafe { x.copy()?.copy_(&x) },
        unsafe { x.copy()?.zero_() },
        unsafe { x.copy()?.add_(&x, 2.0) },
        Tensor::zeros(&[2], Dtype::INT64),
        Tensor::randn(&[2]),
        Tensor::stack(&[&x, &x], 0),
        Tensor::cat(&[&x, &x], 0),
    ];
    assert!(results.len() > OPERATORS.len() + OPERATORS_IN_PLACE.len());
    for (place, result) in results.iter().enumerate() {
        assert!(result.is_ok(), "{place}: {result:?}");
    }
    Ok(())
}

#[test]
fn typed_operators_compute() -> distgrad::Result<()> {
    let x = floats(&[-1.0, 2.0, 3.0, -4.0], &[2, 2]);
    let vector = |tensor: Tensor| tensor.to_vec::<f32>();
    let places = |tensor: Tensor| tensor.to_vec::<i64>();
    // Arguments are where they belong.
    assert_eq!(vector(unsafe { x.copy()?.add_(&x, 2.0) }?)?, [-3.0, 6.0, 9.0, -12.0]);
    assert_eq!(vector(x.clamp(-2.0, 1.0)?)?, [-1.0, 1.0, 1.0, -2.0]);
    assert_eq!(vector(x.leaky_relu(0.5)?)?, [-0.5, 2.0, 3.0, -2.0]);
    assert_eq!(vector(x.masked_fill(&x.lt(&x.neg()?)?, 7.0)?)?, [7.0, 2.0, 3.0, 7.0]);
    assert_eq!(vector(x.narrow(0, 1, 1)?)?, [3.0, -4.0]);
    assert_eq!(vector(x.embedding(&Tensor::arange(2)?)?)?, vector(x.copy()?)?);
    assert_eq!(vector(x.cumsum(1)?)?, [-1.0, 1.0, 3.0, -1.0]);
    assert_eq!(vector(x.permute(&[1, 0])?)?, [-1.0, 3.0, 2.0, -4.0]);
    assert_eq!(vector(x.tril()?)?, [-1.0, 0.0, 3.0, -4.0]);
    let positive = x.gt(&x.zeros_like()?)?;
    assert_eq!(vector(Tensor::choose(&positive, &x, &x.neg()?)?)?, vector(x.abs()?)?);
    assert_eq!(Tensor::full(&[2], 1.5, Dtype::FLOAT64)?.to_vec::<f64>()?, [1.5, 1.5]);

    let (largest, where_) = x.max_dim(1, false)?;
    assert_eq!((vector(largest)?, places(where_)?), (vec![2.0, 3.0], vec![1, 0]));
    let (sorted, from) = x.sort(1, true)?;
    assert_eq!((vector(sorted)?, places(from)?), (vec![2.0, -1.0, 3.0, -4.0], vec![1, 0, 0, 1]));
    let (top, from) = x.topk(1, 0)?;
    assert_eq!((vector(top)?, places(from)?), (vec![3.0, 2.0], vec![1, 0]));
    let rows = x.split(1, 0)?;
    assert_eq!((rows.len(), rows[1].to_vec::<f32>()?), (2, vec![3.0, -4.0]));
    let columns = x.chunk(2, 1)?;
    assert_eq!((columns.len(), columns[1].to_vec::<f32>()?), (2, vec![2.0, -4.0]));
    assert!(x.topk(5, 0).is_err());
    Ok(())
}

#[test]
fn numbers_keep_integers_exact() -> distgrad::Result<()> {
    let large = (1i64 << 53) + 1; // no f64 is this
    let x = Tensor::from_slice(&[large, 3], &[2])?;
    let integers = |tensor: Tensor| tensor.to_vec::<i64>();
    assert_eq!(integers(x.add_scalar(1)?)?, [large + 1, 4]);
    assert_eq!(integers(x.sub_scalar(1)?)?, [large - 1, 2]);
    assert_eq!(integers(x.mul_scalar(-2)?)?, [-2 * large, -6]);
    assert_eq!(integers(x.pow(1)?)?, [large, 3]);
    assert_eq!(integers(x.clamp(0, large - 1)?)?, [large - 1, 3]);
    assert_eq!(integers(x.masked_fill(&x.eq(&x)?, large)?)?, [large; 2]);
    assert_eq!(integers(Tensor::full(&[1], large, Dtype::INT64)?)?, [large]);
    // SAFETY: no other thread has them.
    unsafe {
        assert_eq!(integers(x.copy()?.fill_(large)?)?, [large; 2]);
        assert_eq!(integers(x.copy()?.mul_(2)?)?, [2 * large, 6]);
        assert_eq!(integers(x.copy()?.add_(&x, 2)?)?, [3 * large, 9]);
    }
    assert_eq!(x.div_scalar(2)?.dtype(), Dtype::FLOAT32);
    for real in [x.add_scalar(1.0)?, x.mul_scalar(1f32)?, x.clamp(0, 1.5)?] {
        assert_eq!(real.dtype(), Dtype::FLOAT32);
    }
    Ok(())
}

#[test]
fn history() {
    let weight = floats(&[1.0, 2.0], &[2]).require_grad().unwrap();
    assert!(weight.requires_grad() && weight.square().unwrap().requires_grad());
    assert!(!weight.detach().unwrap().requires_grad());
    {
        let _no_grad = NoGrad::new();
        assert!(!weight.square().unwrap().requires_grad());
        // The mode is the thread's.
        let other = std::thread::scope(|scope| scope.spawn(|| weight.square()).join());
        assert!(other.unwrap().unwrap().requires_grad());
    }
    assert!(weight.square().unwrap().requires_grad());
    let result = weight.square().unwrap().require_grad();
    assert!(result.is_ok() || result.unwrap_err().code() == Code::FailedPrecondition);
    let integers = Tensor::from_slice(&[1i64], &[1]).unwrap().require_grad();
    assert_eq!(integers.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(distgrad::torch_version(), "2.11.0");
}

// As guards of several tasks on one thread do.
#[test]
fn grad_modes_end_in_any_order() {
    let weight = floats(&[1.0], &[1]).require_grad().unwrap();
    let records = || weight.square().unwrap().requires_grad();
    let outer = NoGrad::new();
    let inner = EnableGrad::new();
    drop(outer);
    assert!(records());
    drop(inner);
    assert!(records());

    let outer = NoGrad::new();
    let first = EnableGrad::new();
    let second = EnableGrad::new();
    let third = NoGrad::new();
    drop(second);
    drop(first);
    assert!(!records());
    let last = EnableGrad::new();
    drop(third);
    assert!(records());
    drop(last);
    assert!(!records());
    drop(outer);
    assert!(records());
}
