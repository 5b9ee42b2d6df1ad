package durable

// syncDir does nothing: Windows cannot sync a directory, and its file systems
// keep a journal of names.
var syncDir = func(string) error { return nil }
