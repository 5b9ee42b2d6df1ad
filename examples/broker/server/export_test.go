package server

// InFlight returns how many appends are under way in a partition that exists.
func (s *Server) InFlight(topic string, i int32) (n int) {
	p, err := s.topics.partition(topic, i)
	if err != nil {
		panic(err)
	}
	p.order.Lock()
	defer p.order.Unlock()
	return p.taken + len(p.queue)
}
