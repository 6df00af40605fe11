//! Folders of checkpoints, for the examples that can go on from them.
use distgrad::{CheckpointManager, Code, LoadOptions, Result};
use std::fs;

/// Fails where a folder has checkpoints: a run that begins anew would remove them one by one.
pub fn check_is_new(folder: &str) -> std::result::Result<(), String> {
    // One whose save was killed at its very end has a point before its name yet.
    let is_step = |entry: fs::DirEntry| {
        let name = entry.file_name();
        name.to_string_lossy().trim_start_matches('.').starts_with("step-")
            && entry.path().join("manifest.json").exists()
    };
    // The manager reports a folder that cannot be read.
    if fs::read_dir(folder).is_ok_and(|all| all.flatten().any(is_step)) {
        return Err(format!(
            "{folder} has the checkpoints of another run, which this one would remove: go on from \
             them with --resume, or give another folder"
        ));
    }
    Ok(())
}

/// Loads the newest checkpoint, if there is one, and returns how many steps were taken by then.
pub fn resume(checkpoints: &CheckpointManager<'_>) -> Result<usize> {
    match checkpoints.load(&LoadOptions::new()) {
        Ok(loaded) => Ok(loaded.step as usize),
        Err(error) if error.code() == Code::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}
